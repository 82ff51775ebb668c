/* Which keys an indexer chooses on a CPU.
 *
 * Sizes: T tokens, H heads, S slots of a page, P pages of a row of the page table, D head size, C longest context, K chosen keys at most.
 */

#include "cpu.h"
#include <stdlib.h>

/* Bits that compare as unsigned integers the way the values do. */
INLINE uint32_t ordered(float value) {
    uint32_t bits;
    value += 0.0f; /* one zero, not two */
    memcpy(&bits, &value, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The k-th largest of `count` ordered values: bit by bit, the largest threshold that k of them reach. */
static uint32_t kth_largest(const uint32_t *values, long count, long k) {
    uint32_t threshold = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t higher = threshold | 1u << bit;
        long reached = 0;
        for (long c = 0; c < count; c++) reached += values[c] >= higher;
        if (reached >= k) threshold = higher;
    }
    return threshold;
}

/* chosen [T, K]: positions of the K keys with the highest sum over h of weights[t, h] relu(q[t, h] . k), of those up to the token's own;
 * ascending, then -1. q [T, H, D]; keys [pages, 1, S, D]. */
void choose_keys(const float *q, const float *weights, const void *keys, long is_bfloat16, const int64_t *table, long P, const int64_t *row,
                 const int64_t *position, int64_t *chosen, long T, long H, long S, long D, long C, long K, long threads) {
#pragma omp parallel num_threads((int)threads)
    {
        uint32_t *ranked = malloc(C * sizeof *ranked);
        float *products = malloc(H * S * sizeof *products);
        const float **q_rows = malloc(H * sizeof *q_rows);
        float **out = malloc(H * sizeof *out);
#pragma omp for schedule(dynamic)
        for (long t = 0; t < T; t++) {
            long count = position[t] + 1, number = 0;
            int64_t *at = chosen + t * K;
            if (count > K) {
                for (long h = 0; h < H; h++) q_rows[h] = q + (t * H + h) * D, out[h] = products + h * S;
                for (long first = 0; first < count; first += S) {
                    long here = count - first < S ? count - first : S;
                    const char *page = (const char *)keys + table[row[t] * P + first / S] * S * D * (is_bfloat16 ? 2 : 4);
                    (is_bfloat16 ? product_bfloat16 : product_float32)(q_rows, H, page, 0, here, D, out);
                    for (long c = 0; c < here; c++) {
                        float total = 0;
                        for (long h = 0; h < H; h++) total = fmaf(weights[t * H + h], fmaxf(products[h * S + c], 0), total);
                        ranked[first + c] = ordered(total);
                    }
                }
                uint32_t threshold = kth_largest(ranked, count, K);
                long equal = K;
                for (long c = 0; c < count; c++) equal -= ranked[c] > threshold;
                for (long c = 0; c < count; c++)
                    if (ranked[c] > threshold || (ranked[c] == threshold && equal-- > 0)) at[number++] = c;
            } else {
                while (number < count) at[number] = number, number++;
            }
            while (number < K) at[number++] = -1;
        }
        free(ranked), free(products), free(q_rows), free(out);
    }
}
