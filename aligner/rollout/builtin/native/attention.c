/* Attention of one token of each sequence straight over the sequence's pages: nothing is gathered, nothing beyond its length is read. */
#include "kernels.h"
#include "vector.h"

#define TILE_QUERIES 3
#define TILE_VECTORS 4

static void rotate(const Model *model, const float *cosines, const float *sines, float *x) {
    int64_t half = model->rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] + second * sines[i];
        x[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

/* Queries in place, keys and values of one row into its page. */
static void prepare(const Model *model, const Cache *cache, const Step *step, const float *bias, int64_t row) {
    int64_t size = model->head_dim, heads = model->queries + 2, position = step->positions[row];
    const int64_t turned = step->rotary[row] * model->rotated;
    int64_t page = step->pages[row * step->columns + position / model->page_size];
    int64_t slot = page * model->page_size + position % model->page_size;
    float scale = 1.0f / sqrtf((float)size);
    for (int64_t group = 0; group < model->groups; group++) {
        float *mixed = step->mixed + (row * model->groups + group) * heads * size;
        for (int64_t i = 0; bias && i < heads * size; i++) mixed[i] += bias[group * heads * size + i];
        for (int64_t head = 0; head <= model->queries; head++) {
            float *x = mixed + head * size;
            int is_key = head == model->queries;
            const float *weight = is_key ? cache->k_norm : cache->q_norm;
            if (weight) normalize(model, size, x, weight, is_key ? cache->k_norm_bias : cache->q_norm_bias, x);
            if (model->rotated) rotate(model, model->cosines + turned, model->sines + turned, x);
            for (int64_t i = 0; !is_key && i < size; i++) x[i] *= scale;
        }
        int64_t place = (slot * model->groups + group) * size;
        memcpy(cache->keys + place, mixed + model->queries * size, size * sizeof(float));
        memcpy(cache->values + place, mixed + (model->queries + 1) * size, size * sizeof(float));
    }
}

/* scores -> e^(score - largest), and 1 / their sum */
static float soften(float *scores, int64_t length, int64_t padded) {
    for (int64_t i = length; i < padded; i++) scores[i] = -INFINITY;
    vec best = load(scores), total = {0};
    for (int64_t i = LANES; i < padded; i += LANES) best = larger(load(scores + i), best);
    vec peak = all(largest(best));
    for (int64_t i = 0; i < padded; i += LANES) {
        vec weight = exponential(load(scores + i) - peak);
        store(scores + i, weight);
        total += weight;
    }
    return 1.0f / sum(total);
}

/* out[q][d] += sum over tokens of weights[q][token] * values[token][d], for a few queries and vectors of d */
INLINE void mix(const int queries, const int vectors, int64_t tokens, const float *values, int64_t stride, const float *weights,
                int64_t pitch, float *out, int64_t size) {
    vec sums[TILE_QUERIES][TILE_VECTORS];
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) sums[q][v] = load(out + q * size + v * LANES);
    for (int64_t token = 0; token < tokens; token++, values += stride) {
        vec row[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) row[v] = load(values + v * LANES);
        for (int q = 0; q < queries; q++)
            for (int v = 0; v < vectors; v++) sums[q][v] += weights[q * pitch + token] * row[v];
    }
    for (int q = 0; q < queries; q++)
        for (int v = 0; v < vectors; v++) store(out + q * size + v * LANES, sums[q][v]);
}

INLINE void mix_queries(const int queries, int64_t tokens, const float *values, int64_t stride, const float *weights, int64_t pitch,
                        float *out, int64_t size) {
    int64_t d = 0;
    for (; d + TILE_VECTORS * LANES <= size; d += TILE_VECTORS * LANES)
        mix(queries, TILE_VECTORS, tokens, values + d, stride, weights, pitch, out + d, size);
    for (; d + LANES <= size; d += LANES) mix(queries, 1, tokens, values + d, stride, weights, pitch, out + d, size);
    for (; d < size; d++)
        for (int q = 0; q < queries; q++)
            for (int64_t token = 0; token < tokens; token++) out[q * size + d] += weights[q * pitch + token] * values[token * stride + d];
}

/* The part of a page that belongs to group `group` of `groups`, in the order of memory: pages lie anywhere, so the processor cannot guess
 * which it needs next. */
INLINE void fetch(const float *page, int64_t floats, int64_t group, int64_t groups) {
    for (int64_t i = floats * group / groups; i < floats * (group + 1) / groups; i += 16) __builtin_prefetch(page + i);
}

/* All heads of one row, page by page: a page holds the keys (or the values) of all groups. */
static void attend_row(const Model *model, const Cache *cache, const Step *step, int64_t row, float *scores) {
    const int64_t size = model->head_dim, queries = model->queries, groups = model->groups, stride = groups * size;
    const int64_t length = step->positions[row] + 1, padded = (length + LANES - 1) / LANES * LANES;
    const int64_t page_size = model->page_size, floats = page_size * stride, pages = (length + page_size - 1) / page_size;
    const int32_t *table = step->pages + row * step->columns;
    const float *mixed = step->mixed + row * groups * (queries + 2) * size;
    float *out = step->attended + row * groups * queries * size;
    for (int64_t page = 0; page < pages; page++) {
        const float *keys = cache->keys + table[page] * floats;
        const float *next = page + 1 < pages ? cache->keys + table[page + 1] * floats : cache->values + table[0] * floats;
        int64_t first = page * page_size, count = length - first < page_size ? length - first : page_size;
        for (int64_t group = 0; group < groups; group++) {
            fetch(next, floats, group, groups);
            dots(queries, size, count, mixed + group * (queries + 2) * size, keys + group * size, stride,
                 scores + group * queries * padded + first, padded);
        }
    }
    float scales[groups * queries];
    for (int64_t head = 0; head < groups * queries; head++) scales[head] = soften(scores + head * padded, length, padded);
    memset(out, 0, groups * queries * size * sizeof(float));
    for (int64_t page = 0; page < pages; page++) {
        const float *values = cache->values + table[page] * floats;
        const float *next = cache->values + table[page + 1 < pages ? page + 1 : page] * floats;
        int64_t first = page * page_size, count = length - first < page_size ? length - first : page_size;
        for (int64_t group = 0; group < groups; group++) {
            fetch(next, floats, group, groups);
            const float *value = values + group * size, *weights = scores + group * queries * padded + first;
            float *own = out + group * queries * size;
            int64_t q = 0;
            for (; q + 3 <= queries; q += 3) mix_queries(3, count, value, stride, weights + q * padded, padded, own + q * size, size);
            if (queries - q == 2) mix_queries(2, count, value, stride, weights + q * padded, padded, own + q * size, size);
            if (queries - q == 1) mix_queries(1, count, value, stride, weights + q * padded, padded, own + q * size, size);
        }
    }
    for (int64_t head = 0; head < groups * queries; head++)
        for (int64_t d = 0; d < size; d++) out[head * size + d] *= scales[head];
}

void aligner_attend(const Model *model, const Cache *cache, const Step *step, const float *bias, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < step->rows; row++) prepare(model, cache, step, bias, row);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t row = 0; row < step->rows; row++) attend_row(model, cache, step, row, step->scores + THREAD * step->room);
}
