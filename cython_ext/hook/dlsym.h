/* The exported dlsym and dlvsym. They ask vgpu_door for a wrapper; for every other name they *jump* to the real one with the
 * arguments and the return address of their caller, for dlsym(RTLD_NEXT, ...) means "after the library that called". A C
 * function could not promise that at every optimisation level. Included by symbol_lookup.pyx alone.
 *
 * dlsym has both of the C library's versions: another preload that looks for the next dlsym by dlvsym names one of them, and
 * would pass over a symbol without a version. dlvsym has the newer one alone: the older is by which we find the real one. */
#define VGPU_TWO_NAMES(one, other) ".globl " one "\n.globl " other "\n.set " other ", " one "\n"
__asm__(".symver vgpu_dlsym_new, dlsym@@GLIBC_2.34\n"
        ".symver vgpu_dlsym_old, dlsym@" VGPU_OLD_GLIBC "\n"
        ".symver vgpu_dlvsym_new, dlvsym@@GLIBC_2.34\n");
#if defined(__x86_64__)
#define VGPU_DOOR(name, door, real) \
    __asm__( \
        ".pushsection .text.dlsym, \"ax\", @progbits\n" \
        ".type " name ", @function\n" \
        name ":\n" \
        ".cfi_startproc\n" \
        "    endbr64\n" \
        "    pushq %rdi\n" \
        "    .cfi_adjust_cfa_offset 8\n" \
        "    pushq %rsi\n" \
        "    .cfi_adjust_cfa_offset 8\n" \
        "    pushq %rdx\n" /* the call below needs 16-byte alignment, too */ \
        "    .cfi_adjust_cfa_offset 8\n" \
        "    call " door "\n" \
        "    popq %rdx\n" \
        "    .cfi_adjust_cfa_offset -8\n" \
        "    popq %rsi\n" \
        "    .cfi_adjust_cfa_offset -8\n" \
        "    popq %rdi\n" \
        "    .cfi_adjust_cfa_offset -8\n" \
        "    testq %rax, %rax\n" \
        "    jne 1f\n" \
        "    jmpq *" real "(%rip)\n" \
        "1:  ret\n" \
        ".cfi_endproc\n" \
        ".size " name ", .-" name "\n" \
        ".popsection\n")
#elif defined(__aarch64__)
#define VGPU_DOOR(name, door, real) \
    __asm__( \
        ".pushsection .text.dlsym, \"ax\", @progbits\n" \
        ".type " name ", @function\n" \
        name ":\n" \
        ".cfi_startproc\n" \
        "    hint #34\n" /* bti c */ \
        "    stp x29, x30, [sp, #-48]!\n" \
        "    .cfi_def_cfa_offset 48\n" \
        "    .cfi_offset 29, -48\n" \
        "    .cfi_offset 30, -40\n" \
        "    stp x0, x1, [sp, #16]\n" \
        "    str x2, [sp, #32]\n" \
        "    mov x29, sp\n" \
        "    bl " door "\n" \
        "    mov x16, x0\n" \
        "    ldr x2, [sp, #32]\n" \
        "    ldp x0, x1, [sp, #16]\n" \
        "    ldp x29, x30, [sp], #48\n" \
        "    .cfi_restore 29\n" \
        "    .cfi_restore 30\n" \
        "    .cfi_def_cfa_offset 0\n" \
        "    cbnz x16, 1f\n" \
        "    adrp x16, " real "\n" \
        "    ldr x16, [x16, #:lo12:" real "]\n" \
        "    br x16\n" \
        "1:  mov x0, x16\n" \
        "    ret\n" \
        ".cfi_endproc\n" \
        ".size " name ", .-" name "\n" \
        ".popsection\n")
#endif
VGPU_DOOR("vgpu_dlsym_new", "vgpu_door", "vgpu_real_dlsym");
VGPU_DOOR("vgpu_dlvsym_new", "vgpu_versioned_door", "vgpu_real_dlvsym");
__asm__(VGPU_TWO_NAMES("vgpu_dlsym_new", "vgpu_dlsym_old") ".globl vgpu_dlvsym_new\n");
