/* A piecewise linear function of the distance of two positions, over a number of the query's: `PiecewiseBias` in piecewise.py. */
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
typedef int64_t num;
#ifdef DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* bias [B, H, rows, keys] = slope[h, s] t + level[h, s], t = psi[|i - j|] / under[i], s: how many of the `pieces` - 1 ascending
   ends are below t. i [B, rows], j [B, keys]; psi of the distances 0 .. distances - 1. */
typedef struct {
  const num *i, *j;
  const real *psi, *under, *ends, *slope, *level;
  real *bias;                                  /* in backward its gradient */
  real *of_psi, *of_under, *of_slope, *of_level; /* gradients; but that of `under` one set for each thread */
  num B, H, rows, keys, pieces, distances, i_batch, j_batch, threads;
} Call;

/* t of the keys of a row, and where it changes its piece: keys edge[n] .. edge[n + 1] - 1 are of piece[n]. Neighbours lie near
   each other, so that the search begins at the last piece. */
static num runs(const Call *c, num b, num r, real *t, num *edge, num *piece) {
  const num i = c->i[b * c->i_batch + r], *j = c->j + b * c->j_batch;
  real under = c->under[b * c->rows + r];
  for (num k = 0; k < c->keys; k++) t[k] = c->psi[llabs(i - j[k])] / under;
  num n = 0, s = 0;
  for (num k = 0; k < c->keys; k++) {
    while (s < c->pieces - 1 && c->ends[s] < t[k]) s++;
    while (s > 0 && c->ends[s - 1] >= t[k]) s--;
    if (!n || piece[n - 1] != s) edge[n] = k, piece[n++] = s;
  }
  edge[n] = c->keys;
  return n;
}

static void forward_row(const Call *c, num b, num r, const real *t, const num *edge, const num *piece, num n) {
  for (num h = 0; h < c->H; h++) {
    real *bias = c->bias + ((b * c->H + h) * c->rows + r) * c->keys;
    for (num m = 0; m < n; m++) {
      real slope = c->slope[h * c->pieces + piece[m]], level = c->level[h * c->pieces + piece[m]];
      for (num k = edge[m]; k < edge[m + 1]; k++) bias[k] = slope * t[k] + level;
    }
  }
}

static void backward_row(const Call *c, num b, num r, real *t, real *of_t, const num *edge, const num *piece, num n) {
  num own = omp_get_thread_num(), table = c->H * c->pieces;
  for (num k = 0; k < c->keys; k++) of_t[k] = 0;
  for (num h = 0; h < c->H; h++) {
    const real *g = c->bias + ((b * c->H + h) * c->rows + r) * c->keys;
    for (num m = 0; m < n; m++) {
      num at = h * c->pieces + piece[m];
      real slope = c->slope[at], by_t = 0, alone = 0;
#pragma omp simd reduction(+ : by_t, alone)
      for (num k = edge[m]; k < edge[m + 1]; k++) {
        of_t[k] += slope * g[k];
        by_t += g[k] * t[k];
        alone += g[k];
      }
      c->of_slope[own * table + at] += by_t;
      c->of_level[own * table + at] += alone;
    }
  }
  const num i = c->i[b * c->i_batch + r], *j = c->j + b * c->j_batch;
  real under = c->under[b * c->rows + r], of_under = 0;
#pragma omp simd reduction(+ : of_under)
  for (num k = 0; k < c->keys; k++) of_under -= of_t[k] * t[k];
  for (num k = 0; k < c->keys; k++) c->of_psi[own * c->distances + llabs(i - j[k])] += of_t[k] / under;
  c->of_under[b * c->rows + r] = of_under / under;
}

static void each_row(const Call *c, int back) {
#pragma omp parallel num_threads(c->threads)
  {
    real *t = malloc(2 * c->keys * sizeof(real));
    num *edge = malloc((2 * c->keys + 1) * sizeof(num)), *piece = edge + c->keys + 1;
#pragma omp for schedule(static)
    for (num row = 0; row < c->B * c->rows; row++) {
      num b = row / c->rows, r = row % c->rows, n = runs(c, b, r, t, edge, piece);
      if (back) backward_row(c, b, r, t, t + c->keys, edge, piece, n);
      else forward_row(c, b, r, t, edge, piece, n);
    }
    free(t);
    free(edge);
  }
}

void forward(const Call *c) { each_row(c, 0); }
void backward(const Call *c) { each_row(c, 1); }
