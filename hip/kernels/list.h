/* hip/kernels/list.h: every kernel: KERNEL_ENTRY(name, parameter struct, threads in a workgroup). One line each, grouped by file. */
#ifdef KERNEL_ENTRY
/* ---- act.h, matvec.h ---- */
KERNEL_ENTRY(act, act_params, 256)
KERNEL_ENTRY(embed, embed_params, 256)
KERNEL_ENTRY(matvec_1, matvec_params, 128)
KERNEL_ENTRY(matvec_2, matvec_params, 128)
KERNEL_ENTRY(matvec_3, matvec_params, 128)
KERNEL_ENTRY(matvec_4, matvec_params, 128)
KERNEL_ENTRY(matvec_5, matvec_params, 128)
KERNEL_ENTRY(matvec_6, matvec_params, 128)
KERNEL_ENTRY(matvec_7, matvec_params, 128)
KERNEL_ENTRY(matvec_8, matvec_params, 128)
/* ---- matmul.h ---- */
KERNEL_ENTRY(rows_q4_k, tile_params, 256)
KERNEL_ENTRY(rows_q5_k, tile_params, 256)
KERNEL_ENTRY(rows_q6_k, tile_params, 256)
KERNEL_ENTRY(rows_q8_0, tile_params, 256)
KERNEL_ENTRY(rows_q4_0, tile_params, 256)
KERNEL_ENTRY(rows_f32, tile_params, 256)
KERNEL_ENTRY(rows_f16, tile_params, 256)
KERNEL_ENTRY(rows_bf16, tile_params, 256)
/* ---- moe.h ---- */
/* ---- attn.h ---- */
KERNEL_ENTRY(attn_store, attn_store_params, 128)
KERNEL_ENTRY(attn_few_256, attn_mix_params, 128)
KERNEL_ENTRY(attn_many_256, attn_mix_params, 128)
KERNEL_ENTRY(attn_few_128, attn_mix_params, 128)
KERNEL_ENTRY(attn_many_128, attn_mix_params, 128)
KERNEL_ENTRY(attn_any, attn_mix_params, 128)
KERNEL_ENTRY(attn_few_256_q8, attn_mix_params, 128)
KERNEL_ENTRY(attn_many_256_q8, attn_mix_params, 128)
KERNEL_ENTRY(attn_few_128_q8, attn_mix_params, 128)
KERNEL_ENTRY(attn_many_128_q8, attn_mix_params, 128)
KERNEL_ENTRY(attn_any_q8, attn_mix_params, 128)
/* ---- delta.h ---- */
KERNEL_ENTRY(delta_conv, delta_conv_params, 128)
KERNEL_ENTRY(delta_rule, delta_rule_params, 256)
KERNEL_ENTRY(delta_keep, delta_rule_params, 256)
/* ---- head.h ---- */
KERNEL_ENTRY(top_part, top_params, 256)
KERNEL_ENTRY(top_merge, top_params, 256)
#endif
