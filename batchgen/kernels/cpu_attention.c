/* Attention over paged KV on a CPU: all keys of a row, a window of them, or chosen ones; keys and values of different sizes.
 *
 * A token's keys are taken in blocks of one size from the first it sees, so an output has the same bits whatever surrounds it.
 *
 * Sizes: T tokens, H KV heads, G query heads per KV head, S slots of a page, P pages of a row of the page table, D key size, V value size.
 */

#include "cpu.h"

INLINE float largest(vec v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

typedef struct {
    const char *keys, *values; /* one layer's [pages, H, S, D] and [pages, H, S, V]; rows of values `value_stride` values apart */
    const int64_t *pages;      /* of one row of the page table */
    const int64_t *chosen;     /* positions, ascending; NULL: all, from `low` on */
    long low, H, S, D, V, value_stride, size, head;
} cache;

INLINE long position_of(const cache *kv, long nth) { return kv->chosen ? kv->chosen[nth] : kv->low + nth; }

INLINE long row_of(const cache *kv, long position) {
    return (kv->pages[position / kv->S] * kv->H + kv->head) * kv->S + position % kv->S;
}

/* The nth to nth + count - 1 of the token's keys, added to a running softmax of `rows` query heads, a compile-time constant.
 * most, total: largest score and sum of exponentials so far; out: sum of exponentials times values so far. */
INLINE void attend_keys(const int rows, int is_bfloat16, const float *const *q, const cache *kv, long nth, long count, float *most,
                        float *total, float *const *out) {
    float scores[TILE_ROWS][BLOCK_KEYS], *at[TILE_ROWS], shrink[TILE_ROWS];
    const char *values[BLOCK_KEYS];
    for (long c = 0, piece; c < count; c += piece) { /* a piece: keys side by side */
        long position = position_of(kv, nth + c), row = row_of(kv, position), left = kv->S - position % kv->S;
        for (piece = 1; piece < count - c && piece < left && position_of(kv, nth + c + piece) == position + piece;) piece++;
        for (int r = 0; r < rows; r++) at[r] = scores[r] + c;
        (is_bfloat16 ? product_bfloat16 : product_float32)(q, rows, kv->keys + row * kv->D * kv->size, 0, piece, kv->D, at);
        for (long i = 0; i < piece; i++) values[c + i] = kv->values + (row + i) * kv->value_stride * kv->size;
    }
    for (int r = 0; r < rows; r++) {
        vec high = (vec){0} + most[r], sums = {0};
        for (long c = count; c % LANES; c++) scores[r][c] = -INFINITY;
        for (long c = 0; c < count; c += LANES) {
            vec score = load(scores[r] + c, LANES);
            ivec above = score > high;
            high = (vec)((above & (ivec)score) | (~above & (ivec)high));
        }
        float highest = largest(high);
        for (long c = 0; c < count; c += LANES) {
            vec p = exponential(load(scores[r] + c, LANES) - highest);
            store(scores[r] + c, p, LANES);
            sums += p;
        }
        shrink[r] = exponential((vec){0} + most[r] - highest)[0];
        total[r] = total[r] * shrink[r] + sum(sums);
        most[r] = highest;
    }
    for (long d = 0; d < kv->V; d += LANES) {
        vec add[TILE_ROWS] = {0};
        for (long c = 0; c < count; c++) {
            vec value = load_weight(values[c], d, kv->V - d, is_bfloat16);
            PIN(value);
            for (int r = 0; r < rows; r++) add[r] += value * scores[r][c];
        }
        for (int r = 0; r < rows; r++) store(out[r] + d, load(out[r] + d, kv->V - d) * shrink[r] + add[r], kv->V - d);
    }
}

INLINE void prefetch(const cache *kv, long position) {
    long row = row_of(kv, position);
    for (long at = 0; at < kv->D * kv->size; at += 64) __builtin_prefetch(kv->keys + row * kv->D * kv->size + at);
    for (long at = 0; at < kv->V * kv->size; at += 64) __builtin_prefetch(kv->values + row * kv->value_stride * kv->size + at);
}

#define KEYS(rows) case rows: attend_keys(rows, (int)is_bfloat16, q, &kv, first, count, most, total, sums); break;

/* Causal attention of each token over its own row's keys: out [T, H, G, V]. row: each token's row of the page table [B, P].
 * window: a token sees that many last keys, its own included; 0: all. chosen [T, C]: positions it sees, ascending, then -1; NULL: all.
 * sinks [H, G]: a score of each head that takes part in the softmax and has no value; NULL: none. */
void attention(const float *q, const void *k, const void *v, long value_stride, long is_bfloat16, const int64_t *table, long P,
               const int64_t *row, const int64_t *position, double scale, long window, const float *sinks, const int64_t *chosen, long C,
               float *out, long T, long H, long G, long S, long D, long V, long threads) {
    long slices = (G + TILE_ROWS - 1) / TILE_ROWS;
    double num_keys = 0;
    for (long t = 0; t < T; t++) num_keys += position[t] + 1;
#pragma omp parallel for schedule(dynamic, 4) num_threads((int)threads) if (2.0 * num_keys * H * G * D > FEW_PRODUCTS)
    for (long task = 0; task < T * H * slices; task++) {
        long t = task / (H * slices), h = task / slices % H, g = task % slices * TILE_ROWS;
        int rows = G - g < TILE_ROWS ? (int)(G - g) : TILE_ROWS;
        long low = window && position[t] >= window ? position[t] + 1 - window : 0, number = position[t] + 1 - low;
        cache kv = {k, v, table + row[t] * P, chosen ? chosen + t * C : NULL, low, H, S, D, V, value_stride, is_bfloat16 ? 2 : 4, h};
        if (chosen)
            for (number = 0; number < C && kv.chosen[number] >= 0;) number++;
        float most[TILE_ROWS], total[TILE_ROWS], scaled[TILE_ROWS * D], *sums[TILE_ROWS];
        const float *q_rows[TILE_ROWS], *const *q_at = q_rows;
        for (int r = 0; r < rows; r++) {
            long head = h * G + g + r;
            const float *in = q + (t * H * G + head) * D;
            for (long d = 0; d < D; d++) scaled[r * D + d] = in[d] * (float)scale;
            most[r] = sinks ? sinks[head] : -INFINITY, total[r] = sinks ? 1 : 0;
            q_rows[r] = scaled + r * D, sums[r] = out + (t * H * G + head) * V;
            memset(sums[r], 0, V * sizeof **sums);
        }
        for (long first = 0; first < number; first += BLOCK_KEYS) {
            const float *const *q = q_at;
            long count = number - first < BLOCK_KEYS ? number - first : BLOCK_KEYS;
            for (long next = first + BLOCK_KEYS; next < number && next < first + 2 * BLOCK_KEYS; next++) prefetch(&kv, position_of(&kv, next));
            switch (rows) { KEYS(4) KEYS(3) KEYS(2) KEYS(1) }
        }
        for (int r = 0; r < rows; r++)
            for (long d = 0; d < V; d++) sums[r][d] /= total[r];
    }
}
