/* Products of a dozen rows and more: a vector holds numbers of different rows, so that nothing is summed across it. */
#include "kernels.h"
#include "vector.h"

#define TILE_OUTPUTS 6
#define TILE_VECTORS 2
#define BLOCK 48 /* outputs of a task */

/* y[j][i] = sum over k of w[j][k] * x[k][i] */
INLINE void tile(const int vectors, int64_t inputs, int64_t rows, const float *x, const float *w, float *y) {
    vec sums[TILE_OUTPUTS][TILE_VECTORS] = {0};
    for (int64_t k = 0; k < inputs; k++) {
        vec left[TILE_VECTORS];
        for (int v = 0; v < vectors; v++) left[v] = load(x + k * rows + v * LANES);
        for (int j = 0; j < TILE_OUTPUTS; j++) {
            vec right = all(w[j * inputs + k]);
            for (int v = 0; v < vectors; v++) sums[j][v] += left[v] * right;
        }
    }
    for (int j = 0; j < TILE_OUTPUTS; j++)
        for (int v = 0; v < vectors; v++) store(y + j * rows + v * LANES, sums[j][v]);
}

/* One output of all rows. */
static void single(int64_t inputs, int64_t rows, const float *x, const float *w, float *y) {
    for (int64_t i = 0; i < rows; i += LANES) {
        vec sums = {0};
        for (int64_t k = 0; k < inputs; k++) sums += load(x + k * rows + i) * w[k];
        store(y + i, sums);
    }
}

/* The outputs from w on, [count, rows]. */
static void block(int64_t inputs, int64_t rows, int64_t count, const float *x, const float *w, float *y) {
    int64_t j = 0;
    for (; j + TILE_OUTPUTS <= count; j += TILE_OUTPUTS) {
        int64_t i = 0;
        for (; i + TILE_VECTORS * LANES <= rows; i += TILE_VECTORS * LANES)
            tile(TILE_VECTORS, inputs, rows, x + i, w + j * inputs, y + j * rows + i);
        if (i < rows) tile(1, inputs, rows, x + i, w + j * inputs, y + j * rows + i);
    }
    for (; j < count; j++) single(inputs, rows, x, w + j * inputs, y + j * rows);
}

void aligner_wide_linear(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, float *y, float *columns,
                         int64_t threads) {
    const int64_t padded = (rows + LANES - 1) / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < inputs; k++)
        for (int64_t i = 0; i < padded; i++) columns[k * padded + i] = i < rows ? x[i * inputs + k] : 0;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outputs; first += BLOCK) {
        int64_t count = outputs - first < BLOCK ? outputs - first : BLOCK;
        float found[BLOCK * padded];
        block(inputs, padded, count, columns, w + first * inputs, found);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < count; j++) y[i * outputs + first + j] = found[j * padded + i];
    }
}
