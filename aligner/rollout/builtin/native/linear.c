/* Products of few rows with a large matrix that is read once: tiles of 3 rows by 4 outputs, whose 12 sums stay in registers. */
#include "kernels.h"
#include "vector.h"

#define TILE_ROWS 3
#define TILE_OUTPUTS 4

/* y[i][j] = x[i] . w[j] */
INLINE void tile(const int rows, int64_t inputs, const float *x, const float *w, int64_t stride, float *y, int64_t pitch) {
    vec sums[TILE_ROWS][TILE_OUTPUTS] = {0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) {
        vec left[TILE_ROWS];
        for (int i = 0; i < rows; i++) left[i] = load(x + i * inputs + k);
        for (int j = 0; j < TILE_OUTPUTS; j++) {
            vec right = load(w + j * stride + k);
            for (int i = 0; i < rows; i++) sums[i][j] += left[i] * right;
        }
    }
    for (int i = 0; i < rows; i++) {
        float out[TILE_OUTPUTS];
        sum4(sums[i], out);
        for (int64_t rest = k; rest < inputs; rest++)
            for (int j = 0; j < TILE_OUTPUTS; j++) out[j] += x[i * inputs + rest] * w[j * stride + rest];
        memcpy(y + i * pitch, out, sizeof out);
    }
}

static float dot(int64_t inputs, const float *x, const float *w) {
    vec total = {0};
    int64_t k = 0;
    for (; k + LANES <= inputs; k += LANES) total += load(x + k) * load(w + k);
    float out = sum(total);
    for (; k < inputs; k++) out += x[k] * w[k];
    return out;
}

void dots(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, int64_t stride, float *y, int64_t pitch) {
    int64_t j = 0;
    for (; j + TILE_OUTPUTS <= outputs; j += TILE_OUTPUTS) {
        const float *block = w + j * stride;
        int64_t i = 0;
        for (; i + 3 <= rows; i += 3) tile(3, inputs, x + i * inputs, block, stride, y + i * pitch + j, pitch);
        if (rows - i == 2) tile(2, inputs, x + i * inputs, block, stride, y + i * pitch + j, pitch);
        if (rows - i == 1) tile(1, inputs, x + i * inputs, block, stride, y + i * pitch + j, pitch);
    }
    for (; j < outputs; j++)
        for (int64_t i = 0; i < rows; i++) y[i * pitch + j] = dot(inputs, x + i * inputs, w + j * stride);
}

void aligner_linear(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, float *y, int64_t threads) {
    const int64_t block = 64; /* outputs of a task */
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < outputs; first += block)
        dots(rows, inputs, outputs - first < block ? outputs - first : block, x, w + first * inputs, inputs, y + first, outputs);
}
