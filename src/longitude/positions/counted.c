/* CoPE's bias, rows of scores at a time: `CountedBias` in counted.py. */
#include <math.h>
#include <stdint.h>
typedef int64_t num;
#ifdef DOUBLE
typedef double real;
#define EXP exp
#else
typedef float real;
#define EXP expf
#endif

/* bias [rows, keys] = logits [rows, columns] read at the count, the sum of the gates from a key on, up to columns - 1; allowed
   [rows, keys]. In backward `bias` is its gradient, and of_scores starts as zeros, of_logits too. */
typedef struct {
  const real *scores, *logits;
  const uint8_t *allowed;
  real *bias, *of_scores, *of_logits;
  num rows, keys, columns, threads;
} Call;

static inline real gate(const Call *c, num r, num k) {
  return c->allowed[r * c->keys + k] ? 1 / (1 + EXP(-c->scores[r * c->keys + k])) : 0;
}

/* From the last key on; where the count is full, all keys before have the last column. */
void forward(const Call *c) {
  real full = c->columns - 1;
#pragma omp parallel for schedule(static) num_threads(c->threads)
  for (num r = 0; r < c->rows; r++) {
    const real *logits = c->logits + r * c->columns;
    real *bias = c->bias + r * c->keys, count = 0;
    num k = c->keys;
    while (k-- > 0) {
      count += gate(c, r, k);
      if (count >= full) break;
      num low = isnan(count) ? 0 : (num)count;
      real rest = count - low; /* NaN stays one */
      bias[k] = rest == 0 ? logits[low] : logits[low] + rest * (logits[low + 1] - logits[low]);
    }
    for (; k >= 0; k--) bias[k] = logits[c->columns - 1];
  }
}

/* A gate moves the counts of all keys up to its own: its gradient is their sum. Those of a full count do not move. */
void backward(const Call *c) {
  real full = c->columns - 1;
#pragma omp parallel for schedule(static) num_threads(c->threads)
  for (num r = 0; r < c->rows; r++) {
    const real *logits = c->logits + r * c->columns, *g = c->bias + r * c->keys;
    real *of_logits = c->of_logits + r * c->columns, *of_scores = c->of_scores + r * c->keys, count = 0, sum = 0;
    num k = c->keys;
    while (k-- > 0) {
      count += gate(c, r, k);
      if (count >= full) break;
      num low = isnan(count) ? 0 : (num)count;
      real rest = count - low;
      of_logits[low] += (1 - rest) * g[k];
      if (rest != 0) of_logits[low + 1] += rest * g[k];
      of_scores[k] = rest == 0 ? 0 : g[k] * (logits[low + 1] - logits[low]);
    }
    for (num far = 0; far <= k; far++) of_logits[c->columns - 1] += g[far];
    for (num near = k + 1; near < c->keys; near++) {
      real open = gate(c, r, near);
      sum += of_scores[near];
      of_scores[near] = sum * open * (1 - open);
    }
  }
}
