/* The exported dlsym. Asks vgpu_door for a wrapper; for every other name it *jumps* to the real dlsym with the arguments and
 * the return address of its caller, for dlsym(RTLD_NEXT, ...) means "after the library that called". A C function could not
 * promise that at every optimisation level. Included by doors.pyx alone. */
#if defined(__x86_64__)
__asm__(
    ".pushsection .text.dlsym, \"ax\", @progbits\n"
    ".globl dlsym\n"
    ".type dlsym, @function\n"
    "dlsym:\n"
    ".cfi_startproc\n"
    "    endbr64\n"
    "    pushq %rdi\n"
    "    .cfi_adjust_cfa_offset 8\n"
    "    pushq %rsi\n"
    "    .cfi_adjust_cfa_offset 8\n"
    "    subq $8, %rsp\n" /* the call below needs 16-byte alignment */
    "    .cfi_adjust_cfa_offset 8\n"
    "    call vgpu_door\n"
    "    addq $8, %rsp\n"
    "    .cfi_adjust_cfa_offset -8\n"
    "    popq %rsi\n"
    "    .cfi_adjust_cfa_offset -8\n"
    "    popq %rdi\n"
    "    .cfi_adjust_cfa_offset -8\n"
    "    testq %rax, %rax\n"
    "    jne 1f\n"
    "    jmpq *vgpu_real_dlsym(%rip)\n"
    "1:  ret\n"
    ".cfi_endproc\n"
    ".size dlsym, .-dlsym\n"
    ".popsection\n");
#elif defined(__aarch64__)
__asm__(
    ".pushsection .text.dlsym, \"ax\", @progbits\n"
    ".globl dlsym\n"
    ".type dlsym, @function\n"
    "dlsym:\n"
    ".cfi_startproc\n"
    "    hint #34\n" /* bti c */
    "    stp x29, x30, [sp, #-32]!\n"
    "    .cfi_def_cfa_offset 32\n"
    "    .cfi_offset 29, -32\n"
    "    .cfi_offset 30, -24\n"
    "    stp x0, x1, [sp, #16]\n"
    "    mov x29, sp\n"
    "    bl vgpu_door\n"
    "    mov x16, x0\n"
    "    ldp x0, x1, [sp, #16]\n"
    "    ldp x29, x30, [sp], #32\n"
    "    .cfi_restore 29\n"
    "    .cfi_restore 30\n"
    "    .cfi_def_cfa_offset 0\n"
    "    cbnz x16, 1f\n"
    "    adrp x16, vgpu_real_dlsym\n"
    "    ldr x16, [x16, #:lo12:vgpu_real_dlsym]\n"
    "    br x16\n"
    "1:  mov x0, x16\n"
    "    ret\n"
    ".cfi_endproc\n"
    ".size dlsym, .-dlsym\n"
    ".popsection\n");
#endif
