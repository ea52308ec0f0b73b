/* Drawing one token of each row of logits by inverting the cumulative distribution, and its log-probabilities. */
#include "kernels.h"
#include "vector.h"

#define BLOCK 128 /* weights that are summed before one of them is looked for */

static float row_peak(int64_t size, const float *x) {
    float peak = -INFINITY;
    int64_t i = 0;
    if (size >= LANES) {
        vec best = load(x);
        for (i = LANES; i + LANES <= size; i += LANES) best = larger(load(x + i), best);
        peak = largest(best);
    }
    for (; i < size; i++) peak = x[i] > peak ? x[i] : peak;
    return peak;
}

/* weights = e^((x - peak) / temperature), their sums block by block, and the sum of all; nothing is kept where `weights` is NULL. */
static double row_weights(int64_t size, const float *x, float peak, float temperature, float *weights, double *sums) {
    double total = 0;
    for (int64_t first = 0; first < size; first += BLOCK) {
        int64_t i = first, end = size - first < BLOCK ? size : first + BLOCK;
        vec lanes = {0};
        for (; i + LANES <= end; i += LANES) {
            vec weight = exponential((load(x + i) - peak) / temperature);
            if (weights) store(weights + i, weight);
            lanes += weight;
        }
        double block = sum(lanes);
        for (; i < end; i++) {
            float weight = expf((x[i] - peak) / temperature);
            if (weights) weights[i] = weight;
            block += weight;
        }
        if (weights) sums[first / BLOCK] = block;
        total += block;
    }
    return total;
}

/* The first token at which the cumulative weight is more than `threshold`. Where rounding leaves none: the last one of any weight. */
static int64_t find(int64_t size, const float *weights, const double *sums, double threshold) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK, block = 0;
    double passed = 0;
    for (; block < blocks - 1 && !(passed + sums[block] > threshold); block++) passed += sums[block];
    int64_t token = block * BLOCK, end = block == blocks - 1 ? size : token + BLOCK;
    for (; token < end; token++) {
        passed += weights[token];
        if (passed > threshold) return token;
    }
    for (token = end - 1; token > 0 && !(weights[token] > 0);) token--;
    return token;
}

void aligner_draw(int64_t rows, int64_t vocabulary, const float *logits, const double *uniforms, double temperature, int64_t *tokens,
                  float *logprobs, float *raw_logprobs, float *weights, double *sums, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * vocabulary;
        float *own = weights + THREAD * vocabulary, t = temperature > 0 ? (float)temperature : 1.0f, peak = row_peak(vocabulary, x);
        double *own_sums = sums + THREAD * ((vocabulary + BLOCK - 1) / BLOCK), total = row_weights(vocabulary, x, peak, t, own, own_sums);
        int64_t token = 0;
        if (temperature > 0)
            token = find(vocabulary, own, own_sums, uniforms[row] * total);
        else
            while (token < vocabulary - 1 && x[token] != peak) token++;
        tokens[row] = token;
        logprobs[row] = (x[token] - peak) / t - (float)log(total);
        if (raw_logprobs) {
            double raw = t == 1.0f ? total : row_weights(vocabulary, x, peak, 1.0f, NULL, NULL);
            raw_logprobs[row] = x[token] - peak - (float)log(raw);
        }
    }
}
