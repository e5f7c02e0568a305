/* tests/hip/emu/object.c: code objects: the bundle of clang, the ELF file, kernel descriptors, arguments, and the instructions through llvm-objdump-19. */
#include "tests/hip/emu/emu.h"

#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/hip/emu/hip_errors.h"

enum { BUNDLE_MAGIC = 24, MAX_KERNELS = 512, MAX_OBJECT = 64 << 20 };

/* ---- which ELF ---- */

static uint64_t u64_at(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static size_t elf_bytes(const uint8_t *p)
{
    Elf64_Ehdr h;
    memcpy(&h, p, sizeof h);
    return (size_t)h.e_shoff + (size_t)h.e_shentsize * h.e_shnum;
}

/* The entry of a bundle whose target ends in -gfxNNNN; NULL: none. */
static const uint8_t *find_in_bundle(const uint8_t *p, const char *arch, size_t *bytes)
{
    const uint64_t n = u64_at(p + BUNDLE_MAGIC);
    const uint8_t *e = p + BUNDLE_MAGIC + 8;
    const size_t arch_len = strlen(arch);
    for (uint64_t i = 0; i < n && i < 64; i++) {
        const uint64_t offset = u64_at(e), size = u64_at(e + 8), len = u64_at(e + 16);
        const char *id = (const char *)e + 24;
        if (len > 256)
            return NULL;
        if (len > arch_len && id[len - arch_len - 1] == '-' && memcmp(id + len - arch_len, arch, arch_len) == 0) {
            *bytes = size;
            return p + offset;
        }
        e += 24 + len;
    }
    return NULL;
}

/* ---- the image ---- */

static int load_segments(struct module *m, const uint8_t *elf, size_t bytes)
{
    Elf64_Ehdr h;
    memcpy(&h, elf, sizeof h);
    uint64_t top = 0;
    for (int i = 0; i < h.e_phnum; i++) {
        Elf64_Phdr p;
        memcpy(&p, elf + h.e_phoff + (size_t)i * h.e_phentsize, sizeof p);
        if (p.p_type != PT_LOAD)
            continue;
        if (p.p_offset + p.p_filesz > bytes || p.p_vaddr + p.p_memsz > MAX_OBJECT)
            return -1;
        top = p.p_vaddr + p.p_memsz > top ? p.p_vaddr + p.p_memsz : top;
    }
    m->image_bytes = (top + 8191) & ~4095ull;
    m->image = mmap(NULL, m->image_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->image == MAP_FAILED) {
        m->image = NULL;
        return -1;
    }
    for (int i = 0; i < h.e_phnum; i++) {
        Elf64_Phdr p;
        memcpy(&p, elf + h.e_phoff + (size_t)i * h.e_phentsize, sizeof p);
        if (p.p_type == PT_LOAD)
            memcpy(m->image + p.p_vaddr, elf + p.p_offset, p.p_filesz);
    }
    return 0;
}

/* Value of a dynamic symbol; 0: none. */
static uint64_t symbol(const uint8_t *elf, const char *name, uint64_t *bytes)
{
    Elf64_Ehdr h;
    memcpy(&h, elf, sizeof h);
    for (int i = 0; i < h.e_shnum; i++) {
        Elf64_Shdr s, strings;
        memcpy(&s, elf + h.e_shoff + (size_t)i * h.e_shentsize, sizeof s);
        if (s.sh_type != SHT_DYNSYM)
            continue;
        memcpy(&strings, elf + h.e_shoff + (size_t)s.sh_link * h.e_shentsize, sizeof strings);
        for (uint64_t k = 0; k < s.sh_size / sizeof(Elf64_Sym); k++) {
            Elf64_Sym sym;
            memcpy(&sym, elf + s.sh_offset + k * sizeof sym, sizeof sym);
            if (strcmp((const char *)elf + strings.sh_offset + sym.st_name, name) == 0) {
                *bytes = sym.st_size;
                return sym.st_value;
            }
        }
    }
    return 0;
}

/* ---- LLVM's tools ---- */

/* Opens a pipe from `tool arguments elf`, the tool being that of LLVM 19 or a newer one; the environment may name another. */
static FILE *open_tool(const struct module *m, const char *variable, const char *tool, const char *arguments)
{
    char command[512];
    const int n = snprintf(command, sizeof command,
                           "t=${%s:-$(command -v %s-19 || command -v %s-20 || command -v %s-21 || echo %s)}; exec $t %s /proc/%d/fd/%d", variable,
                           tool, tool, tool, tool, arguments, (int)getpid(), m->file);
    return n > 0 && (size_t)n < sizeof command ? popen(command, "r") : NULL;
}

/* ---- notes: names, arguments, registers ---- */

/* The number of a line like ".size: 24". */
static bool note_number(const char *line, const char *name, unsigned *out)
{
    const size_t n = strlen(name);
    char *end;
    if (strncmp(line, name, n) != 0)
        return false;
    *out = (unsigned)strtoul(line + n, &end, 10);
    return end != line + n;
}

/* The notes are YAML with kernels at indentation 2 and their arguments at 6. */
static void read_note_line(struct module *m, const char *line, char arch[64])
{
    const char *s = line + strspn(line, " ");
    const size_t indent = (size_t)(s - line);
    const bool item = s[0] == '-' && s[1] == ' ';
    const char *target = strstr(line, "amdhsa.target:");
    if (target) {
        const char *gfx = strstr(target, "gfx");
        if (gfx)
            snprintf(arch, 64, "%.*s", (int)strspn(gfx, "abcdefghijklmnopqrstuvwxyz0123456789-"), gfx);
        return;
    }
    if (item)
        s += 2 + strspn(s + 2, " ");
    if (item && *s != '.') /* amdhsa.version */
        return;
    if (item && indent == 2 && m->n_kernels < MAX_KERNELS)
        m->n_kernels++;
    if (m->n_kernels == 0)
        return;
    struct kernel *k = &m->kernels[m->n_kernels - 1];
    unsigned x;
    char text[96], kind[40];
    if (indent >= 6) {
        if (item && indent == 6 && k->n_args < 40)
            k->n_args++;
        if (k->n_args == 0)
            return;
        struct kernel_arg *a = &k->args[k->n_args - 1];
        if (note_number(s, ".offset:", &x))
            a->offset = x;
        else if (note_number(s, ".size:", &x))
            a->size = x;
        else if (sscanf(s, ".value_kind: %39s", kind) == 1 && strncmp(kind, "hidden_", 7) == 0)
            memcpy(a->hidden, kind, sizeof kind);
        return;
    }
    if (sscanf(s, ".name: %95s", text) == 1)
        snprintf(k->name, sizeof k->name, "%s", text);
    else if (note_number(s, ".kernarg_segment_size:", &x))
        k->kernarg_bytes = x;
    else if (note_number(s, ".vgpr_count:", &x))
        k->vgprs = x;
    else if (note_number(s, ".sgpr_count:", &x))
        k->sgprs = x;
    else if (note_number(s, ".vgpr_spill_count:", &x) || note_number(s, ".sgpr_spill_count:", &x))
        k->spills += x;
    else if (note_number(s, ".max_flat_workgroup_size:", &x))
        k->max_threads = x;
}

static int read_notes(struct module *m, char arch[64])
{
    char line[512];
    FILE *f = open_tool(m, "EMU_READELF", "llvm-readelf", "--notes");
    m->kernels = calloc(MAX_KERNELS, sizeof *m->kernels);
    if (!f || !m->kernels) {
        if (f)
            pclose(f);
        return -1;
    }
    while (fgets(line, sizeof line, f))
        read_note_line(m, line, arch);
    return pclose(f) == 0 && m->n_kernels > 0 ? 0 : -1;
}

/* ---- instructions ---- */

static int grow(struct kernel *k)
{
    const uint32_t room = k->room ? k->room * 2 : 1024;
    struct insn *insns = realloc(k->insns, room * sizeof *insns);
    if (!insns)
        return -1;
    k->insns = insns;
    char **texts = realloc(k->text, room * sizeof *texts);
    if (!texts)
        return -1;
    k->text = texts;
    uint64_t *addresses = realloc(k->address, room * sizeof *addresses);
    if (!addresses)
        return -1;
    k->address = addresses;
    k->room = room;
    return 0;
}

static int add_insn(struct kernel *k, const char *text, uint64_t address, uint32_t encoding)
{
    if ((!k->insns || k->n_insns + 1 >= k->room) && grow(k) != 0)
        return -1;
    struct insn *in = &k->insns[k->n_insns];
    memset(in, 0, 2 * sizeof *in); /* and the one after the last, which nobody reaches */
    in->number = k->n_insns;
    in[1].run = emu_run_unknown;
    k->text[k->n_insns] = strdup(text);
    k->address[k->n_insns] = address;
    if (!k->text[k->n_insns])
        return -1;
    emu_decode(in, text, encoding, k->module->gfx12);
    if (in->op_class == OP_LOAD || in->op_class == OP_STORE || in->op_class == OP_ATOMIC || in->op_class == OP_SMEM)
        in->slot = (uint8_t)(k->n_memory++ % SEEN);
    k->n_insns++;
    return 0;
}

/* Index of the instruction at an address; n_insns: none. */
static uint32_t insn_at(const struct kernel *k, uint64_t address)
{
    uint32_t low = 0, high = k->n_insns;
    while (low < high) {
        const uint32_t mid = (low + high) / 2;
        if (k->address[mid] < address)
            low = mid + 1;
        else
            high = mid;
    }
    return low < k->n_insns && k->address[low] == address ? low : k->n_insns;
}

static void find_targets(struct kernel *k)
{
    for (uint32_t i = 0; i < k->n_insns; i++) {
        struct insn *in = &k->insns[i];
        if (in->op_class != OP_BRANCH || in->n_operands == 0)
            continue;
        const uint32_t to = insn_at(k, k->address[i] + 4 + (uint64_t)((int64_t)(int16_t)in->o[0].literal * 4));
        if (to == k->n_insns)
            in->run = emu_run_unknown;
        else
            in->target = &k->insns[to];
    }
}

/* Lines like "\tv_add_f32 v0, v1, v2   // 000000001234: 06040702 ..." Reading one kernel when it is first launched is much quicker than reading all. */
int emu_kernel_decode(struct kernel *k)
{
    char line[1024], arguments[96];
    if (k->insns)
        return 0;
    snprintf(arguments, sizeof arguments, "-d --start-address=0x%llx --stop-address=0x%llx", (unsigned long long)k->begin,
             (unsigned long long)k->end);
    FILE *f = open_tool(k->module, "EMU_OBJDUMP", "llvm-objdump", arguments);
    if (!f)
        return -1;
    int rc = 0;
    while (fgets(line, sizeof line, f)) {
        char *comment = strstr(line, "// ");
        if (line[0] != '\t' || !comment || rc != 0)
            continue;
        char *end;
        const uint64_t address = strtoull(comment + 3, &end, 16);
        const uint32_t encoding = *end == ':' ? (uint32_t)strtoul(end + 1, NULL, 16) : 0;
        *comment = 0;
        size_t n = strlen(line);
        while (n && isspace((unsigned char)line[n - 1]))
            line[--n] = 0;
        rc = add_insn(k, line + 1, address, encoding);
    }
    if (pclose(f) != 0 || rc != 0 || !k->insns || k->address[0] != k->begin) {
        fprintf(stderr, "emulator: llvm-objdump-19 gives no instructions for %s (is llvm-19 installed?)\n", k->name);
        return -1;
    }
    find_targets(k);
    return 0;
}

/* ---- kernel descriptors (LLVM's AMDGPU usage guide, "Kernel Descriptor") ---- */

static int read_descriptor(struct module *m, struct kernel *k, const uint8_t *elf)
{
    char name[104];
    snprintf(name, sizeof name, "%s.kd", k->name);
    uint64_t bytes;
    const uint64_t at = symbol(elf, name, &bytes);
    if (at == 0 || at + 64 > m->image_bytes)
        return -1;
    uint32_t rsrc2;
    int64_t entry;
    uint16_t properties;
    memcpy(&k->lds_bytes, m->image + at, 4);
    memcpy(&k->scratch_bytes, m->image + at + 4, 4);
    memcpy(&entry, m->image + at + 16, 8);
    memcpy(&rsrc2, m->image + at + 52, 4);
    memcpy(&properties, m->image + at + 56, 2);
    k->module = m;
    k->begin = at + (uint64_t)entry;
    if (symbol(elf, k->name, &bytes) != k->begin)
        return -1;
    k->end = k->begin + bytes;
    k->wave32 = properties >> 10 & 1;
    k->user_sgprs = rsrc2 >> 1 & 31;
    k->id_x = rsrc2 >> 7 & 1;
    k->id_y = rsrc2 >> 8 & 1;
    k->id_z = rsrc2 >> 9 & 1;
    k->kernarg_ptr = properties >> 3 & 1;
    k->kernarg_at = (properties & 1 ? 4u : 0u) + (properties & 2 ? 2u : 0u) + (properties & 4 ? 2u : 0u);
    k->counters = emu_counters_for(k->name);
    if (!k->counters)
        return -1;
    k->counters->vgprs = k->vgprs;
    k->counters->sgprs = k->sgprs;
    k->counters->lds_bytes = k->lds_bytes;
    k->counters->spills = k->spills;
    return 0;
}

/* ---- loading ---- */

static int load_elf(struct module *m, const uint8_t *elf, size_t bytes, const char *arch)
{
    char target[64] = "";
    m->gfx12 = strncmp(arch, "gfx12", 5) == 0;
    m->file = memfd_create("code object", 0);
    if (m->file < 0 || write(m->file, elf, bytes) != (ssize_t)bytes || load_segments(m, elf, bytes) != 0)
        return HIP_ERROR_OUT_OF_MEMORY;
    if (read_notes(m, target) != 0) {
        fprintf(stderr, "emulator: no kernels found with llvm-readelf-19 (is llvm-19 installed?)\n");
        return HIP_ERROR_INVALID_IMAGE;
    }
    if (strcmp(target, arch) != 0) {
        fprintf(stderr, "emulator: code object is for %s, the emulated device is %s\n", target, arch);
        return HIP_ERROR_NO_BINARY;
    }
    for (int i = 0; i < m->n_kernels; i++)
        if (read_descriptor(m, &m->kernels[i], elf) != 0) {
            fprintf(stderr, "emulator: kernel %s has no descriptor\n", m->kernels[i].name);
            return HIP_ERROR_INVALID_IMAGE;
        }
    return 0;
}

int emu_module_load(struct module **out, const void *image)
{
    const char *wish = getenv("EMU_ARCH"), *arch = wish ? wish : "gfx1152";
    const uint8_t *elf = image;
    size_t bytes;
    if (memcmp(elf, "__CLANG_OFFLOAD_BUNDLE__", BUNDLE_MAGIC) == 0) {
        elf = find_in_bundle(elf, arch, &bytes);
        if (!elf)
            return HIP_ERROR_NO_BINARY;
    } else if (memcmp(elf, ELFMAG, SELFMAG) == 0) {
        bytes = elf_bytes(elf);
    } else {
        return HIP_ERROR_INVALID_IMAGE;
    }
    if (bytes < sizeof(Elf64_Ehdr) || bytes > MAX_OBJECT || memcmp(elf, ELFMAG, SELFMAG) != 0)
        return HIP_ERROR_INVALID_IMAGE;
    struct module *m = calloc(1, sizeof *m);
    if (!m)
        return HIP_ERROR_OUT_OF_MEMORY;
    m->file = -1;
    const int rc = load_elf(m, elf, bytes, arch);
    if (rc != 0) {
        emu_module_free(m);
        return rc;
    }
    emu_add_module(m);
    *out = m;
    return 0;
}

static void free_kernel(struct kernel *k)
{
    for (uint32_t i = 0; i < k->n_insns; i++) {
        free(k->text[i]);
        free((void *)(uintptr_t)k->insns[i].dual_x);
        free((void *)(uintptr_t)k->insns[i].dual_y);
        free((void *)(uintptr_t)k->insns[i].dpp);
    }
    free(k->insns);
    free(k->text);
    free(k->address);
}

void emu_module_free(struct module *m)
{
    if (!m)
        return;
    emu_forget_module(m);
    for (int i = 0; i < m->n_kernels; i++)
        free_kernel(&m->kernels[i]);
    free(m->kernels);
    if (m->image)
        munmap(m->image, m->image_bytes);
    if (m->file >= 0)
        close(m->file);
    free(m);
}
