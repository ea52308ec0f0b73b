/* The decoder's kernels. Tensors are float32 and contiguous, row by row, unless a stride is named; a bias that is not there is NULL. */
#ifndef ALIGNER_KERNELS_H
#define ALIGNER_KERNELS_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))

enum { RMS_NORM, LAYER_NORM, LAYER_NORM_1P };
enum { SILU, GELU, GELU_TANH, SQUARED_RELU };

typedef struct { /* this rank's share of the model */
    int64_t hidden, groups, queries, head_dim, rotated, page_size;
    int64_t norm, activation, gated;
    double eps;
    const float *cosines, *sines; /* [positions, rotated]; the first half of each row of sines negated */
} Model;

typedef struct { /* one layer's norms of queries and keys (NULL: none), and its pages [pages, page_size, groups, head_dim] */
    const float *q_norm, *q_norm_bias, *k_norm, *k_norm_bias;
    float *keys, *values;
} Cache;

typedef struct { /* the rows of a decode step */
    int64_t rows, columns, room; /* room: floats of `scores` for each thread */
    const int64_t *positions;    /* [rows] */
    const int64_t *rotary;       /* [rows]: the positions that rotate */
    const int32_t *pages;        /* [rows, columns] */
    float *mixed, *attended;     /* [rows, groups, queries + 2, head_dim], [rows, groups, queries, head_dim] */
    float *scores;
} Step;

/* y [rows, outputs] = x [rows, inputs] w^T */
EXPORTED void aligner_linear(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, float *y, int64_t threads);
/* the same; columns: scratch for `inputs` times the rows, rounded up to 16 */
EXPORTED void aligner_wide_linear(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, float *y, float *columns,
                                  int64_t threads);
/* the first in one thread, w's rows `stride` and y's rows `pitch` apart */
HIDDEN void dots(int64_t rows, int64_t inputs, int64_t outputs, const float *x, const float *w, int64_t stride, float *y, int64_t pitch);
/* out = norm(x) of one row */
HIDDEN void normalize(const Model *model, int64_t size, const float *x, const float *weight, const float *bias, float *out);
/* x += delta + delta_bias (delta NULL: nothing); out = norm(x) */
EXPORTED void aligner_add_norm(const Model *model, int64_t rows, float *x, const float *delta, const float *delta_bias, const float *weight,
              const float *bias, float *out, int64_t threads);
/* out [rows, inner] = activation(gate + bias) * (up + bias) of up [rows, 2 inner] = [gate; up], or activation(up + bias) of [rows, inner] */
EXPORTED void aligner_activate(const Model *model, int64_t rows, int64_t inner, const float *up, const float *bias, float *out, int64_t threads);
/* add the bias to `mixed`, norm and rotate queries and keys, put keys and values into their pages, and attend */
EXPORTED void aligner_attend(const Model *model, const Cache *cache, const Step *step, const float *bias, int64_t threads);
/* one token for each row: see native.draw */
EXPORTED void aligner_draw(int64_t rows, int64_t vocabulary, const float *logits, const double *uniforms, double temperature, int64_t *tokens,
          float *logprobs, float *raw_logprobs, float *weights, double *sums, int64_t threads);

#endif
