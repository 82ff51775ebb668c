/* Layers that keep a state per sequence, on a CPU: a short causal convolution and the gated delta rule (Yang et al. 2024; Kimi Linear 2025).
 *
 * Token by token in order, so an output has the same bits however a sequence is cut into chunks and whatever surrounds it.
 *
 * Sizes: B sequences, whose tokens begin at start[b] (B + 1 of them), C channels, W taps, H heads, G value heads per key head, K key size,
 * V value size. state[b]: the sequence's place among the states; fresh[b]: it begins here, its state is taken as zero.
 */

#include "cpu.h"

/* out_TC = silu of the causal convolution of x_TC with taps [C, W]; states [., C, W - 1]: the last inputs, oldest first. */
void convolve(const float *x, const float *taps, float *states, const int64_t *start, const int64_t *state, const int64_t *fresh,
              float *out, long B, long C, long W, long threads) {
    const long block = 64, blocks = (C + block - 1) / block;
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (start[B] * C * W > SMALL)
    for (long task = 0; task < B * blocks; task++) {
        long b = task / blocks, first = task % blocks * block, end = first + block < C ? first + block : C;
        for (long c = first; c < end; c++) {
            float *past = states + (state[b] * C + c) * (W - 1);
            if (fresh[b]) memset(past, 0, (W - 1) * sizeof *past);
            for (long t = start[b]; t < start[b + 1]; t++) {
                float now = x[t * C + c], total = 0;
                for (long w = 0; w < W - 1; w++) total = fmaf(past[w], taps[c * W + w], total);
                total = fmaf(now, taps[c * W + W - 1], total);
                for (long w = 0; w + 2 < W; w++) past[w] = past[w + 1];
                if (W > 1) past[W - 2] = now;
                out[t * C + c] = total;
            }
        }
        for (long t = start[b]; t < start[b + 1]; t++)
            for (long c = first; c < end; c += LANES) {
                vec v = load(out + t * C + c, end - c);
                store(out + t * C + c, v / (exponential(-v) + 1.0f), end - c);
            }
    }
}

/* Logarithms of decay: -exp(rate) softplus(x + bias), or with a bound below 0: bound * sigmoid(exp(rate) (x + bias)).
 * x and out [T, H, K], rate [H], bias [H, K]. */
void log_decay(const float *x, const float *rate, const float *bias, double bound, float *out, long T, long H, long K, long threads) {
#pragma omp parallel for num_threads((int)threads) if (T * H * K > SMALL)
    for (long row = 0; row < T * H; row++) {
        float grown = expf(rate[row % H]);
        for (long k = 0; k < K; k++) {
            float v = x[row * K + k] + bias[row % H * K + k];
            out[row * K + k] = bound < 0 ? (float)bound / (1.0f + expf(-grown * v)) : -grown * (v > 20.0f ? v : log1pf(expf(v)));
        }
    }
}

/* For each head, state S [K, V]: S scaled by exp(log_decay), then S += beta k (v - S^T k)^T, out = S^T q.
 * q, k [T, H, K]; v, out [T, H * G, V]; log_decay [T, H * G, K], or one for all K (`wide` 0); beta [T, H * G]; states [., H * G, K, V]. */
void delta_rule(const float *q, const float *k, const float *v, const float *log_decay, long wide, const float *beta, float *states,
                const int64_t *start, const int64_t *state, const int64_t *fresh, float *out, long B, long H, long G, long K, long V,
                long threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads) if (start[B] * H * G * K * V > SMALL)
    for (long task = 0; task < B * H * G; task++) {
        long b = task / (H * G), head = task % (H * G);
        float *S = states + (state[b] * H * G + head) * K * V, decay[K], change[V];
        if (fresh[b]) memset(S, 0, K * V * sizeof *S);
        for (long t = start[b]; t < start[b + 1]; t++) {
            const float *key = k + (t * H + head / G) * K, *query = q + (t * H + head / G) * K, *g = log_decay + (t * H * G + head) * (wide ? K : 1);
            const float *value = v + (t * H * G + head) * V, strength = beta[t * H * G + head];
            float *y = out + (t * H * G + head) * V;
            for (long i = 0; i < K; i += LANES) store(decay + i, exponential(wide ? load(g + i, K - i) : (vec){0} + *g), K - i);
            for (long j = 0; j < V; j += LANES) {
                vec seen = {0};
                for (long i = 0; i < K; i++) {
                    vec s = load(S + i * V + j, V - j) * decay[i];
                    store(S + i * V + j, s, V - j);
                    seen = multiply_add(s, (vec){0} + key[i], seen);
                }
                store(change + j, (load(value + j, V - j) - seen) * strength, V - j);
            }
            for (long j = 0; j < V; j += LANES) {
                vec total = {0}, by = load(change + j, V - j);
                for (long i = 0; i < K; i++) {
                    vec s = multiply_add(by, (vec){0} + key[i], load(S + i * V + j, V - j));
                    store(S + i * V + j, s, V - j);
                    total = multiply_add(s, (vec){0} + query[i], total);
                }
                store(y + j, total, V - j);
            }
        }
    }
}
