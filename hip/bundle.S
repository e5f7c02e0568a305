/* hip/bundle.S: see bundle.h. HIP_BUNDLE is the file's name, or is not defined. */
    .section .rodata
    .globl hip_bundle_start, hip_bundle_end
    .balign 4096
hip_bundle_start:
#ifdef HIP_BUNDLE
    .incbin HIP_BUNDLE
#endif
hip_bundle_end:
    .byte 0
#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack,"",%progbits
#endif
