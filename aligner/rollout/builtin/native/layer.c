/* Norms with the residual addition before them, and activations. */
#include "kernels.h"
#include "vector.h"

/* Sums of (x - shift) and of its square. */
INLINE void moments(int64_t size, const float *x, float shift, float *first, float *second) {
    vec sums = {0}, squares = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec v = load(x + i) - shift;
        sums += v;
        squares += v * v;
    }
    *first = sum(sums), *second = sum(squares);
    for (; i < size; i++) *first += x[i] - shift, *second += (x[i] - shift) * (x[i] - shift);
}

void normalize(const Model *model, int64_t size, const float *x, const float *weight, const float *bias, float *out) {
    float total, squares, mean = 0, offset = model->norm == LAYER_NORM_1P ? 1.0f : 0.0f;
    moments(size, x, 0, &total, &squares);
    if (model->norm != RMS_NORM) {
        mean = total / (float)size;
        moments(size, x, mean, &total, &squares);
    }
    float scale = (float)(1.0 / sqrt((double)squares / (double)size + model->eps));
    for (int64_t i = 0; i < size; i++) out[i] = (x[i] - mean) * scale * (weight[i] + offset);
    for (int64_t i = 0; bias && i < size; i++) out[i] += bias[i];
}

void aligner_add_norm(const Model *model, int64_t rows, float *x, const float *delta, const float *delta_bias, const float *weight,
              const float *bias, float *out, int64_t threads) {
    int64_t size = model->hidden;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        float *own = x + row * size;
        for (int64_t i = 0; delta && i < size; i++) own[i] += delta[row * size + i];
        for (int64_t i = 0; delta_bias && i < size; i++) own[i] += delta_bias[i];
        normalize(model, size, own, weight, bias, out + row * size);
    }
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

static float activation(int64_t kind, float x) {
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    if (kind == GELU_TANH) return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    if (kind == SQUARED_RELU) return x > 0 ? x * x : (x == x ? 0 : x);
    return x / (1.0f + expf(-x));
}

static void activate_row(int64_t kind, int64_t inner, const float *gate, const float *gate_bias, const float *up, const float *up_bias,
                         float *out) {
    int64_t i = 0;
    for (; kind == SILU && i + LANES <= inner; i += LANES) {
        vec x = load(gate + i);
        if (gate_bias) x += load(gate_bias + i);
        x = silu(x);
        if (up) x *= up_bias ? load(up + i) + load(up_bias + i) : load(up + i);
        store(out + i, x);
    }
    for (; i < inner; i++) {
        float x = activation(kind, gate_bias ? gate[i] + gate_bias[i] : gate[i]);
        if (up) x *= up_bias ? up[i] + up_bias[i] : up[i];
        out[i] = x;
    }
}

void aligner_activate(const Model *model, int64_t rows, int64_t inner, const float *up, const float *bias, float *out, int64_t threads) {
    int64_t width = model->gated ? 2 * inner : inner;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *own = up + row * width;
        activate_row(model->activation, inner, own, bias, model->gated ? own + inner : NULL, model->gated && bias ? bias + inner : NULL,
                     out + row * inner);
    }
}
