/* tests/unit/backend_reference.h: every backend operation written once more from spec/qwen35moe.md, in double precision over whole sequences,
 * without pages, slots, chunks or steps. For comparison with what a fixture run collected. Include after <cmocka.h>. */
#ifndef BEDSIDE_TESTS_BACKEND_REFERENCE_H
#define BEDSIDE_TESTS_BACKEND_REFERENCE_H

#include "tests/unit/backend_fixture.h"

static inline double ref_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static inline double ref_silu(double x)
{
    return x / (1 + exp(-x));
}

/* Element of a fixture matrix. */
static inline double ref_at(const struct fixture_matrix *m, int mat, int o, int i)
{
    return (double)m->values[((size_t)mat * (size_t)m->desc.n_out + (size_t)o) * (size_t)m->desc.n_in + (size_t)i];
}

static inline double *ref_doubles(size_t n)
{
    double *p = calloc(n, sizeof *p);
    assert_non_null(p);
    return p;
}

/* RMSNorm of one row, section 4. */
static inline void ref_norm(const float *x, const struct fixture_matrix *norm, double eps, double *y)
{
    const int n = (int)norm->desc.n_in;
    double mean = 0;
    for (int i = 0; i < n; i++)
        mean += (double)x[i] * (double)x[i] / n;
    for (int i = 0; i < n; i++)
        y[i] = (double)x[i] / sqrt(mean + eps) * ref_at(norm, 0, 0, i);
}

static inline void ref_product(const struct fixture_matrix *w, int mat, const double *x, double *y)
{
    for (int o = 0; o < w->desc.n_out; o++) {
        y[o] = 0;
        for (int i = 0; i < w->desc.n_in; i++)
            y[o] += ref_at(w, mat, o, i) * x[i];
    }
}

/* y [D] += scale * down(SiLU(gate x) * up x). */
static inline void ref_swiglu(const struct fixture_model *m, enum fixture_name gate, enum fixture_name up, enum fixture_name down, int mat,
                              const double *x, double scale, double *y)
{
    const int ff = (int)m->m[gate].desc.n_out, d = m->shape.n_embd;
    double *g = ref_doubles((size_t)ff), *u = ref_doubles((size_t)ff), *z = ref_doubles((size_t)d);
    ref_product(&m->m[gate], mat, x, g);
    ref_product(&m->m[up], mat, x, u);
    for (int i = 0; i < ff; i++)
        g[i] = ref_silu(g[i]) * u[i];
    ref_product(&m->m[down], mat, g, z);
    for (int i = 0; i < d; i++)
        y[i] += scale * z[i];
    free(g);
    free(u);
    free(z);
}

/* Section 7 steps 1 to 5 over a whole sequence: qkv [T][CH], gates [T][2][HV]. */
static inline void ref_delta_conv(const struct fixture_model *m, const float *u, const float *beta, const float *alpha, int n, double *qkv,
                                  double *gates)
{
    const struct backend_shape *sh = &m->shape;
    const int ch = fixture_channels(sh), hv = sh->delta_v_heads, s = sh->delta_dim, taps = sh->conv_width;
    for (int t = 0; t < n; t++) {
        double *row = qkv + (size_t)t * (size_t)ch;
        for (int c = 0; c < ch; c++) {
            double sum = 0;
            for (int back = 0; back < taps && back <= t; back++)
                sum += ref_at(&m->m[FM_CONV], 0, c, taps - 1 - back) * (double)u[(size_t)(t - back) * (size_t)ch + (size_t)c];
            row[c] = ref_silu(sum);
        }
        for (int head = 0; head < 2 * sh->delta_k_heads; head++) {
            double length = 0;
            for (int i = 0; i < s; i++)
                length += row[head * s + i] * row[head * s + i];
            length = fmax(sqrt(length), (double)sh->norm_eps);
            for (int i = 0; i < s; i++)
                row[head * s + i] /= head < sh->delta_k_heads ? length * sqrt((double)s) : length;
        }
        for (int h = 0; h < hv; h++) {
            double x = (double)alpha[t * hv + h] + ref_at(&m->m[FM_DT_BIAS], 0, 0, h);
            gates[(2 * t) * hv + h] = ref_sigmoid((double)beta[t * hv + h]);
            gates[(2 * t + 1) * hv + h] = ref_at(&m->m[FM_A], 0, 0, h) * (x > 20 ? x : log(1 + exp(x)));
        }
    }
}

/* Section 7 steps 6 to 8 over a whole sequence, token by token: the textbook recurrence. out [T][HV*S]. */
static inline void ref_delta_rule(const struct fixture_model *m, const double *qkv, const double *gates, const float *z, int n, double *out)
{
    const struct backend_shape *sh = &m->shape;
    const int ch = fixture_channels(sh), hk = sh->delta_k_heads, hv = sh->delta_v_heads, s = sh->delta_dim;
    double *mem = ref_doubles((size_t)s * (size_t)s), *d = ref_doubles((size_t)s), *o = ref_doubles((size_t)s);
    for (int h = 0; h < hv; h++) {
        memset(mem, 0, (size_t)s * (size_t)s * sizeof *mem);
        for (int t = 0; t < n; t++) {
            const double *q = qkv + (size_t)t * (size_t)ch + (h % hk) * s, *k = q + hk * s;
            const double *v = qkv + (size_t)t * (size_t)ch + 2 * hk * s + h * s;
            const double beta = gates[(2 * t) * hv + h], g = gates[(2 * t + 1) * hv + h];
            double squares = 0;
            for (int i = 0; i < s * s; i++)
                mem[i] *= exp(g);
            for (int j = 0; j < s; j++) {
                double p = 0;
                for (int i = 0; i < s; i++)
                    p += mem[i * s + j] * k[i];
                d[j] = (v[j] - p) * beta;
            }
            for (int i = 0; i < s; i++)
                for (int j = 0; j < s; j++)
                    mem[i * s + j] += k[i] * d[j];
            for (int j = 0; j < s; j++) {
                o[j] = 0;
                for (int i = 0; i < s; i++)
                    o[j] += mem[i * s + j] * q[i];
                squares += o[j] * o[j];
            }
            for (int j = 0; j < s; j++) {
                const size_t to = ((size_t)t * (size_t)hv + (size_t)h) * (size_t)s + (size_t)j;
                out[to] = o[j] / sqrt(squares / s + (double)sh->norm_eps) * ref_at(&m->m[FM_DELTA_NORM], 0, 0, j) * ref_silu((double)z[to]);
            }
        }
    }
    free(mem);
    free(d);
    free(o);
}

/* Section 6 steps 3 and 4 for one head. */
static inline void ref_norm_rope(const struct backend_shape *sh, const struct fixture_matrix *norm, const float *x, int pos, double *y)
{
    ref_norm(x, norm, (double)sh->norm_eps, y);
    for (int j = 0; j < sh->n_rot / 2; j++) {
        const double angle = pos / pow((double)sh->rope_theta, 2.0 * j / sh->n_rot);
        const double a = y[j], b = y[j + sh->n_rot / 2];
        y[j] = a * cos(angle) - b * sin(angle);
        y[j + sh->n_rot / 2] = b * cos(angle) + a * sin(angle);
    }
}

/* Keys or values x [n], n a multiple of HD, rounded to how they are kept, in place. Q8_0: section 3 of spec/gguf.md. */
static inline void ref_as_kv(enum kv_type type, double *x, int n)
{
    for (int i = 0; i < n && type == KV_F16; i++)
        x[i] = (double)f16_to_f32(f32_to_f16((float)x[i]));
    for (int b = 0; b < n && type == KV_Q8_0; b += 32) {
        float most = 0;
        for (int i = b; i < b + 32; i++)
            most = fmaxf(most, fabsf((float)x[i]));
        const float d = f16_to_f32(f32_to_f16(most / 127));
        for (int i = b; i < b + 32; i++)
            x[i] = (double)d * (double)nearbyintf((float)x[i] / d);
    }
}

/* Section 6 steps 3 to 7 over a whole sequence: q_out as attn_store leaves q, out [T][NH*HD]. */
static inline void ref_attention(const struct fixture_model *m, const float *q, const float *k, const float *v, int n, double *q_out, double *out)
{
    const struct backend_shape *sh = &m->shape;
    const int hd = sh->head_dim, nh = sh->n_heads, nkv = sh->n_kv_heads, stride = sh->attn_gated ? 2 * hd : hd;
    double *keys = ref_doubles((size_t)n * (size_t)(nkv * hd)), *values = ref_doubles((size_t)n * (size_t)(nkv * hd)), *p = ref_doubles((size_t)n);
    for (int i = 0; i < n * nkv * hd; i++)
        values[i] = (double)v[i];
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < nkv; h++)
            ref_norm_rope(sh, &m->m[FM_K_NORM], k + (t * nkv + h) * hd, t, keys + (t * nkv + h) * hd);
        for (int h = 0; h < nh; h++) {
            const float *x = q + (size_t)(t * nh + h) * (size_t)stride;
            double *y = q_out + (size_t)(t * nh + h) * (size_t)stride;
            for (int i = hd; i < stride; i++)
                y[i] = (double)x[i];
            ref_norm_rope(sh, &m->m[FM_Q_NORM], x, t, y);
        }
    }
    ref_as_kv(sh->kv_type, keys, n * nkv * hd);
    ref_as_kv(sh->kv_type, values, n * nkv * hd);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < nh; h++) {
            const double *query = q_out + (size_t)(t * nh + h) * (size_t)stride;
            const int kv = h / (nh / nkv);
            double total = 0;
            for (int s = 0; s <= t; s++) {
                double score = 0;
                for (int i = 0; i < hd; i++)
                    score += query[i] * keys[(s * nkv + kv) * hd + i];
                p[s] = exp(score * (double)sh->attn_scale); /* scores are small here: no maximum needed */
                total += p[s];
            }
            for (int i = 0; i < hd; i++) {
                double sum = 0;
                for (int s = 0; s <= t; s++)
                    sum += p[s] / total * values[(s * nkv + kv) * hd + i];
                out[(size_t)(t * nh + h) * (size_t)hd + (size_t)i] = sum * (sh->attn_gated ? ref_sigmoid(query[hd + i]) : 1);
            }
        }
    free(keys);
    free(values);
    free(p);
}

/* Section 8 for one row: y [D] = h + MoE, chosen [used]. */
static inline void ref_moe(const struct fixture_model *m, const float *h, double *y, int *chosen)
{
    const struct backend_shape *sh = &m->shape;
    const int e_count = sh->n_experts, used = sh->n_experts_used;
    double *x = ref_doubles((size_t)sh->n_embd), *p = ref_doubles((size_t)e_count), total = 0;
    ref_norm(h, &m->m[FM_NORM], (double)sh->norm_eps, x);
    ref_product(&m->m[FM_ROUTER], 0, x, p);
    for (int i = 0; i < used; i++)
        chosen[i] = 0;
    for (int e = 0; e < e_count; e++)
        p[e] = exp(p[e]);
    for (int e = 0; e < e_count; e++) { /* rank: how many come before e */
        int rank = 0;
        for (int f = 0; f < e_count; f++)
            rank += p[f] > p[e] || (f < e && !(p[f] < p[e]));
        if (rank < used) {
            chosen[rank] = e;
            total += p[e];
        }
    }
    for (int i = 0; i < sh->n_embd; i++)
        y[i] = (double)h[i];
    for (int i = 0; i < used; i++)
        ref_swiglu(m, FM_EXP_GATE, FM_EXP_UP, FM_EXP_DOWN, chosen[i], x, p[chosen[i]] / total, y);
    if (sh->shared_ff > 0) {
        double gate = 0;
        ref_product(&m->m[FM_SH_ROUTER], 0, x, &gate);
        ref_swiglu(m, FM_SH_GATE, FM_SH_UP, FM_SH_DOWN, 0, x, ref_sigmoid(gate), y);
    }
    free(x);
    free(p);
}

/* What the operation should give for the first n tokens of sequence q: want[i] [n][op.out[i]] for all FIXTURE_BUFFERS, released with free(). The
 * experts of FO_MOE come as doubles. */
static inline void ref_operation(const struct fixture_model *m, const struct fixture_data *data, int q, int n, double **want)
{
    const struct backend_shape *sh = &m->shape;
    const struct fixture_op *op = &data->op;
    const size_t d = (size_t)sh->n_embd;
    const double eps = (double)sh->norm_eps;
    float *const *in = data->in[q];
    double *x = ref_doubles(2 * d);
    for (int i = 0; i < FIXTURE_BUFFERS; i++)
        want[i] = ref_doubles((size_t)n * op->out[i]); /* nothing in those that the operation does not have */

    if (op->kind == FO_ATTN) {
        ref_attention(m, in[0], in[1], in[2], n, want[0], want[1]);
    } else if (op->kind == FO_DELTA_CONV || op->kind == FO_DELTA) {
        ref_delta_conv(m, in[0], in[1], in[2], n, want[0], want[1]);
        if (op->kind == FO_DELTA)
            ref_delta_rule(m, want[0], want[1], in[3], n, want[2]);
    } else if (op->kind == FO_DELTA_RULE) {
        double *qkv = ref_doubles((size_t)n * op->in[0]), *gates = ref_doubles((size_t)n * op->in[1]);
        for (size_t i = 0; i < (size_t)n * op->in[0]; i++)
            qkv[i] = (double)in[0][i];
        for (size_t i = 0; i < (size_t)n * op->in[1]; i++)
            gates[i] = (double)in[1][i];
        ref_delta_rule(m, qkv, gates, in[2], n, want[0]);
        free(qkv);
        free(gates);
    }
    for (size_t t = 0; t < (size_t)n; t++) {
        switch (op->kind) {
        case FO_EMBED:
            for (size_t i = 0; i < d; i++)
                want[0][t * d + i] = ref_at(&m->m[FM_EMBD], 0, data->ids[q][t], (int)i);
            break;
        case FO_PROJECT:
            ref_norm(in[0] + t * d, &m->m[FM_NORM], eps, x);
            for (int i = 0; i < 4; i++)
                ref_product(&m->m[FM_PROJ_0 + i], 0, x, want[i] + t * op->out[i]);
            break;
        case FO_PROJECT_ADD:
            for (size_t o = 0; o < d; o++) {
                want[0][t * d + o] = (double)in[1][t * d + o];
                for (size_t i = 0; i < op->in[0]; i++)
                    want[0][t * d + o] += ref_at(&m->m[FM_BACK], 0, (int)o, (int)i) * (double)in[0][t * op->in[0] + i];
            }
            break;
        case FO_MLP:
            ref_norm(in[0] + t * d, &m->m[FM_NORM], eps, x);
            for (size_t i = 0; i < d; i++)
                want[0][t * d + i] = (double)in[0][t * d + i];
            ref_swiglu(m, FM_GATE, FM_UP, FM_DOWN, 0, x, 1, want[0] + t * d);
            break;
        case FO_MOE: {
            int chosen[64];
            ref_moe(m, in[0] + t * d, want[0] + t * d, chosen);
            for (size_t i = 0; i < op->out[1]; i++)
                want[1][t * op->out[1] + i] = chosen[i];
            break;
        }
        case FO_HEAD:
            ref_norm(in[0] + t * d, &m->m[FM_NORM], eps, want[0] + t * d);
            ref_product(&m->m[FM_HEAD], 0, want[0] + t * d, want[1] + t * op->out[1]);
            break;
        case FO_MTP_JOIN:
            ref_norm(in[0] + t * d, &m->m[FM_ENORM], eps, x);
            ref_norm(in[1] + t * d, &m->m[FM_HNORM], eps, x + d);
            ref_product(&m->m[FM_EH_PROJ], 0, x, want[0] + t * d);
            break;
        default:
            break;
        }
    }
    free(x);
}

#endif
