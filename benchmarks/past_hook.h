/* A function of a library as the library's own symbol table has it, for benchmarks that compare the hook with the driver.
 * Every door of the loader (dlsym, dlvsym, the exported symbol) leads to the hook. The table in memory is no door: a
 * program that reads it bypasses a cooperative hook, and NVML shows such a program to the GPU Server. */
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

/* NULL: the library defines no such function. `library` is a handle of dlopen. */
static void *past_hook(void *library, const char *name) {
    struct link_map *map = 0;
    const ElfW(Sym) *symbols = 0;
    const char *names = 0;
    const uint32_t *hash = 0, *gnu_hash = 0;
    uint32_t count = 0;
    if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map) || !map) return 0;
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (const char *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_HASH) hash = (const uint32_t *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_GNU_HASH) gnu_hash = (const uint32_t *)entry->d_un.d_ptr;
    }
    if (!symbols || !names) return 0;
    if (hash) count = hash[1];
    if (!count && gnu_hash) { /* the last symbol of the last chain */
        const uint32_t *buckets = gnu_hash + 4 + gnu_hash[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
        const uint32_t *chains = buckets + gnu_hash[0];
        for (uint32_t i = 0; i < gnu_hash[0]; i++)
            if (buckets[i] > count) count = buckets[i];
        if (count >= gnu_hash[1]) {
            while (!(chains[count - gnu_hash[1]] & 1)) count++;
            count++;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && symbols[i].st_value && !strcmp(names + symbols[i].st_name, name))
            return (void *)(map->l_addr + symbols[i].st_value);
    return 0;
}
