/* What a decoder computes on a CPU: dense layers, experts, norms, the router. Attention is in cpu_attention.c, what keeps a state per
 * sequence in cpu_delta.c.
 * In: float32 activations; weights as stored, float32 or bfloat16, those of experts also packed (cpu_quant.c). Out: float32. Never
 * allocates, packs or copies a weight.
 *
 * Sizes: T tokens, K experts per token, E experts, R = T * K rows of the expert batch, D inputs, N outputs, F expert width, H heads.
 */

#include <omp.h>

#include "cpu.h"

/* y_TN = x_TD @ weight_ND^T, rows of x `stride` apart. */
void linear(const float *x, long stride, const void *weight, long is_bfloat16, float *y, long T, long N, long D, long threads) {
    product_function multiply = is_bfloat16 ? product_bfloat16 : product_float32;
    long across = (N + TASK_OUTPUTS - 1) / TASK_OUTPUTS, down = (T + TASK_ROWS - 1) / TASK_ROWS;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if ((double)T * N * D > FEW_PRODUCTS)
    for (long task = 0; task < across * down; task++) {
        long top = task / across * TASK_ROWS, first = task % across * TASK_OUTPUTS;
        long rows = T - top < TASK_ROWS ? T - top : TASK_ROWS, end = N - first < TASK_OUTPUTS ? N : first + TASK_OUTPUTS;
        const float *in[TASK_ROWS];
        float *out[TASK_ROWS];
        for (long r = 0; r < rows; r++) in[r] = x + (top + r) * stride, out[r] = y + (top + r) * N + first;
        multiply(in, rows, weight, first, end, D, out);
    }
}

/* y[t, h] = W[h] x[t, h], with W[h] [N, D], or with `transposed` W[h]^T x[t, h], with W[h] [D, N]. Strides in values: tokens and heads of
 * x, heads of the weight. */
void head_products(const float *x, long token_stride, long head_stride, const void *weight, long weight_stride, long is_bfloat16,
                   long transposed, float *y, long T, long H, long N, long D, long threads) {
    product_function multiply = is_bfloat16 ? product_bfloat16 : product_float32;
    long size = is_bfloat16 ? 2 : 4, rows = 4 * TILE_ROWS, blocks = (T + rows - 1) / rows;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if ((double)T * H * N * D > FEW_PRODUCTS)
    for (long task = 0; task < H * blocks; task++) {
        long h = task / blocks, top = task % blocks * rows, count = T - top < rows ? T - top : rows;
        const char *matrix = (const char *)weight + h * weight_stride * size;
        const float *in[4 * TILE_ROWS];
        float *out[4 * TILE_ROWS];
        for (long r = 0; r < count; r++) in[r] = x + (top + r) * token_stride + h * head_stride, out[r] = y + ((top + r) * H + h) * N;
        if (!transposed) {
            multiply(in, count, matrix, 0, N, D, out);
            continue;
        }
        for (long n = 0; n < N; n += LANES)
            for (long first = 0; first < count; first += TILE_ROWS) {
                long tile = count - first < TILE_ROWS ? count - first : TILE_ROWS;
                vec total[TILE_ROWS] = {0};
                for (long d = 0; d < D; d++) {
                    vec w = load_weight(matrix, d * N + n, N - n, (int)is_bfloat16);
                    for (long r = 0; r < tile; r++) total[r] = multiply_add((vec){0} + in[first + r][d], w, total[r]);
                }
                for (long r = 0; r < tile; r++) store(out[first + r] + n, total[r], N - n);
            }
    }
}

INLINE vec sigmoid(vec v) { return 1.0f / (exponential(-v) + 1.0f); }

INLINE vec clamp(vec v, float least, float most) {
    const vec low = (vec){0} + least, high = (vec){0} + most;
    ivec above = v > high, below = v < low;
    return (vec)((above & (ivec)high) | (below & (ivec)low) | (~(above | below) & (ivec)v));
}

enum { SILU, CLAMPED, SITU, LIMITED };

/* gate := activation(gate, up) over F values.
 * SILU: silu(gate) up. CLAMPED: gate below b and up within -b..b, then gate sigmoid(a gate) (up + 1).
 * SITU: a tanh(gate / a) sigmoid(gate) b tanh(up / b). LIMITED: the clamps, then silu(gate) up. */
static void gate_values(float *gate, const float *up, long F, long kind, float a, float b) {
    for (long f = 0; f < F; f += LANES) {
        vec g = load(gate + f, F - f), u = load(up + f, F - f);
        if (kind == LIMITED) g = clamp(g, -INFINITY, b), u = clamp(u, -b, b);
        if (kind == SILU || kind == LIMITED) {
            g = g / (exponential(-g) + 1.0f) * u;
        } else if (kind == CLAMPED) {
            g = clamp(g, -INFINITY, b);
            g = g * sigmoid(g * a) * (clamp(u, -b, b) + 1.0f);
        } else {
            vec s = sigmoid(g);
            for (int i = 0; i < LANES; i++) g[i] = a * tanhf(g[i] / a), u[i] = b * tanhf(u[i] / b);
            g = g * s * u;
        }
        store(gate + f, g, F - f);
    }
}

/* out_TF = activation of x_T2F, whose rows hold F gates, then F ups. */
void gate(const float *x, long kind, double a, double b, float *out, long T, long F, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * F > SMALL)
    for (long t = 0; t < T; t++) {
        memcpy(out + t * F, x + t * 2 * F, F * sizeof *out);
        gate_values(out + t * F, x + t * 2 * F + F, F, kind, (float)a, (float)b);
    }
}

/* out = y sigmoid(x), or y silu(x), over n values; without y, the function itself. */
void sigmoid_times(const float *x, const float *y, long silu, float *out, long n, long threads) {
#pragma omp parallel for num_threads((int)threads) if (n > SMALL)
    for (long i = 0; i < n; i += LANES) {
        vec v = load(x + i, n - i), s = sigmoid(v);
        if (silu) s = s * v;
        store(out + i, y ? s * load(y + i, n - i) : s, n - i);
    }
}

INLINE void add_bias(float *y, const void *bias, int is_bfloat16, long at, long count) {
    for (long n = 0; n < count; n += LANES) store(y + n, load(y + n, count - n) + load_weight(bias, at + n, count - n, is_bfloat16), count - n);
}

/* A layer of experts: out_TD = sum over k of weights_TK * down(activation(gate(x), up(x))) of expert ids_TK; biases may be NULL.
 * Work space: order_R and start_E (E + 1) of int64, hidden_RF and y_RD of float32; for packed weights `scratch` [threads, scratch_size], which
 * holds `panel` rows of D or `down_panel` rows of F. */
void experts(const float *x, const matrix *gates, const matrix *ups, const matrix *downs, const void *gate_up_bias, const void *down_bias,
             long is_bfloat16, long kind, double a, double b, const int64_t *ids, const float *weights, float *out, long T, long K, long E,
             long D, long F, int64_t *order, int64_t *start, float *hidden, float *y, long panel, long down_panel, long scratch_size,
             float *scratch, long threads) {
    memset(start, 0, (E + 1) * sizeof *start);
    for (long r = 0; r < T * K; r++) start[ids[r] + 1]++;
    for (long e = 0; e < E; e++) start[e + 1] += start[e];
    for (long r = 0; r < T * K; r++) order[start[ids[r]]++] = r;
    for (long e = E; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
    long wide = (F + TASK_OUTPUTS - 1) / TASK_OUTPUTS, deep = (D + TASK_OUTPUTS - 1) / TASK_OUTPUTS;
#pragma omp parallel num_threads((int)threads) if (3.0 * T * K * D * F > FEW_PRODUCTS)
    {
#pragma omp for schedule(dynamic)
        for (long task = 0; task < E * wide; task++) {
            long e = task / wide, first = task % wide * TASK_OUTPUTS, end = F - first < TASK_OUTPUTS ? F : first + TASK_OUTPUTS;
            for (long top = start[e]; top < start[e + 1]; top += TASK_ROWS) {
                long rows = start[e + 1] - top < TASK_ROWS ? start[e + 1] - top : TASK_ROWS;
                const float *in[TASK_ROWS];
                float *gate_rows[TASK_ROWS], *up_rows[TASK_ROWS], up[TASK_ROWS * TASK_OUTPUTS];
                for (long r = 0; r < rows; r++) {
                    in[r] = x + order[top + r] / K * D;
                    gate_rows[r] = hidden + (top + r) * F + first;
                    up_rows[r] = up + r * TASK_OUTPUTS;
                }
                matrix_product(gates, e, in, rows, first, end, D, gate_rows, panel, scratch + omp_get_thread_num() * scratch_size);
                matrix_product(ups, e, in, rows, first, end, D, up_rows, panel, scratch + omp_get_thread_num() * scratch_size);
                for (long r = 0; r < rows; r++) {
                    if (gate_up_bias) {
                        add_bias(gate_rows[r], gate_up_bias, (int)is_bfloat16, e * 2 * F + first, end - first);
                        add_bias(up_rows[r], gate_up_bias, (int)is_bfloat16, e * 2 * F + F + first, end - first);
                    }
                    gate_values(gate_rows[r], up_rows[r], end - first, kind, (float)a, (float)b);
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (long task = 0; task < E * deep; task++) {
            long e = task / deep, first = task % deep * TASK_OUTPUTS, end = D - first < TASK_OUTPUTS ? D : first + TASK_OUTPUTS;
            for (long top = start[e]; top < start[e + 1]; top += TASK_ROWS) {
                long rows = start[e + 1] - top < TASK_ROWS ? start[e + 1] - top : TASK_ROWS;
                const float *in[TASK_ROWS];
                float *rows_out[TASK_ROWS];
                for (long r = 0; r < rows; r++) in[r] = hidden + (top + r) * F, rows_out[r] = y + order[top + r] * D + first;
                matrix_product(downs, e, in, rows, first, end, F, rows_out, down_panel, scratch + omp_get_thread_num() * scratch_size);
                for (long r = 0; down_bias && r < rows; r++) add_bias(rows_out[r], down_bias, (int)is_bfloat16, e * D + first, end - first);
            }
        }
#pragma omp for
        for (long t = 0; t < T; t++)
            for (long d = 0; d < D; d++) {
                float total = 0;
                for (long k = 0; k < K; k++) total += weights[t * K + k] * y[(t * K + k) * D + d];
                out[t * D + d] = total;
            }
    }
}

/* out = x / rms(x) * weight over the last D of rows [T, heads, D]; tokens of x are `stride` apart. */
void rms_norm(const float *x, long stride, const void *weight, long is_bfloat16, double eps, float *out, long T, long heads, long D,
              long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * heads * D > SMALL)
    for (long row = 0; row < T * heads; row++) {
        const float *in = x + row / heads * stride + row % heads * D;
        vec squares = {0};
        for (long d = 0; d < D; d += LANES) {
            vec v = load(in + d, D - d);
            squares += v * v;
        }
        float scale = 1.0f / sqrtf(sum(squares) / (float)D + (float)eps);
        for (long d = 0; d < D; d += LANES) {
            vec v = load_weight(weight, d, D - d, (int)is_bfloat16) * (load(in + d, D - d) * scale);
            store(out + row * D + d, v, D - d);
        }
    }
}

/* out: pairs (i, i + D/2) of each head of x [T, heads, D] rotated by its token's angle; table [T, 2, D]: cosines, then sines of which the
 * first half is negated. */
void rotate(const float *x, long stride, const float *table, float *out, long T, long heads, long D, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * heads * D > SMALL)
    for (long row = 0; row < T * heads; row++) {
        const float *in = x + row / heads * stride + row % heads * D, *cosine = table + row / heads * 2 * D, *sine = cosine + D;
        for (long d = 0; d < D; d++) out[row * D + d] = in[d] * cosine[d] + in[d < D / 2 ? d + D / 2 : d - D / 2] * sine[d];
    }
}

enum { SOFTMAX, SIGMOID, CHOSEN };

/* K experts of each token, best first, equals by number. Scores: SOFTMAX over all E, SIGMOID of each, or CHOSEN: logits, of which the
 * softmax is taken over the K. They are ranked by score + bias, only in the `kept` best of `groups` equal groups (a group counts the sum of
 * its `top` best). Weights: the scores without bias, scaled to sum to 1 on request, times `scale`. `work` is [T, 2, E]; NaN logits give
 * NaN weights. */
void route(const float *logits, const float *bias, long scoring, long groups, long kept, long top, long normalise, double scale, long T,
           long E, long K, int64_t *ids, float *weights, float *work, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * E > SMALL)
    for (long t = 0; t < T; t++) {
        const float *x = logits + t * E;
        float *score = work + t * 2 * E, *rank = score + E, most = x[0], total = 0, chosen = 0;
        for (long e = 1; e < E; e++) most = x[e] > most ? x[e] : most;
        for (long e = 0; e < E; e += LANES) {
            vec v = load(x + e, E - e);
            store(score + e, scoring == SIGMOID ? sigmoid(v) : exponential(v - most), E - e);
        }
        for (long e = 0; e < E; e++) total += score[e];
        for (long e = 0; e < E && scoring == SOFTMAX; e++) score[e] /= total;
        for (long e = 0; e < E; e++) rank[e] = (scoring == CHOSEN ? x[e] : score[e]) + (bias ? bias[e] : 0);
        if (kept < groups) {
            long width = E / groups;
            float best[groups];
            for (long g = 0; g < groups; g++) {
                long taken = -1;
                best[g] = 0;
                for (long i = 0; i < top; i++) { /* the largest, then the largest but one */
                    long at = -1;
                    for (long e = g * width; e < (g + 1) * width; e++)
                        if (e != taken && (at < 0 || rank[e] > rank[at])) at = e;
                    best[g] += rank[at], taken = at;
                }
            }
            for (long g = 0; g < groups; g++) {
                long better = 0;
                for (long h = 0; h < groups; h++) better += best[h] > best[g] || (best[h] == best[g] && h < g);
                for (long e = g * width; better >= kept && e < (g + 1) * width; e++) rank[e] = -INFINITY;
            }
        }
        for (long k = 0; k < K; k++) {
            long at = 0;
            for (long e = 1; e < E; e++) at = rank[e] > rank[at] ? e : at;
            ids[t * K + k] = at;
            weights[t * K + k] = score[at];
            chosen += score[at];
            rank[at] = -INFINITY;
        }
        if (normalise && scoring == SIGMOID) chosen += 1e-20f;
        for (long k = 0; k < K; k++) {
            if (normalise || scoring == CHOSEN) weights[t * K + k] /= chosen;
            weights[t * K + k] *= total == total ? (float)scale : NAN;
        }
    }
}
