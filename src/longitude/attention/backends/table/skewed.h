/* Vectors of offsets in a tile: score += q . vector at the diagonal. Queries of a block are multiplied with a panel of diagonals at a time, and
   a tile reads the product a number further in each row; backward adds up the gradients of scores in the same way. */
#pragma once
#include "curved.h"

#define BLOCK 48 /* queries that use a panel while it is in the cache */
#define MARGIN (3 * PANEL + BLOCK)
#define SKEWED ((BLOCK + 3 * PANEL - 3) / PANEL) /* panels of diagonals that a block and a panel of keys meet at */
#define WINDOW (SKEWED * PANEL)

/* A head's vectors, each at its diagonal + MARGIN, across panels and down, with zeros; the length of the longest. */
static real lay_vectors(const Shape *s, num head, num length, num dim, real *across, real *down) {
  const real *x = s->vectors + head * s->vectors_head;
  real longest = 0;
  memset(across, 0, length * dim * sizeof(real));
  if (down) memset(down, 0, length * dim * sizeof(real));
  for (num m = 0; m < s->vectors_count; m++, x += s->dim) {
    num p = m + s->near + MARGIN;
    real square = 0;
    for (num d = 0; d < s->dim; d++) {
      across[p / PANEL * dim * PANEL + d * PANEL + p % PANEL] = x[d], square += x[d] * x[d];
      if (down) down[p * dim + d] = x[d];
    }
    longest = square > longest || square != square ? square : longest;
  }
  return (real)sqrt(longest);
}

/* Whether any diagonal of a panel has a vector and is allowed. */
INLINE int has_vectors(const Shape *s, num panel) {
  num from = panel * PANEL - MARGIN, low = most(s->first, s->near), high = least(s->last + 1, s->near + s->vectors_count);
  return from < high && from + PANEL > low;
}

/* q . vector + bias of `rows` queries [rows, WINDOW], from a panel on. step: how many panels further than what is in `to`; 0: all of them. */
static void meet(const Shape *s, const real *q, num rows, num dim, const real *vectors, const real *biases, num panel, int step, real *to) {
  for (num r = 0; step && r < rows; r++)
    memmove(to + r * WINDOW + (step < 0 ? PANEL : 0), to + r * WINDOW + (step < 0 ? 0 : PANEL), (WINDOW - PANEL) * sizeof(real));
  for (num m = step > 0 ? SKEWED - 1 : 0; m < (step < 0 ? 1 : SKEWED); m++)
    for (num r = 0; r < rows; r += ROWS)
      product(ROWS, ACROSS, has_vectors(s, panel + m) ? dim : 0, q + r * dim, dim, 1, vectors + (panel + m) * dim * PANEL, PANEL,
              biases + (panel + m) * PANEL, 0, to + r * WINDOW + m * PANEL, WINDOW);
}

/* Gradients by diagonal [rows, WINDOW] from a panel on: its first `count` panels are added to those of queries and vectors, and left. */
static void part(const Shape *s, num rows, num dim, real *slopes, num panel, num count, const real *q, const real *vectors, real *of_q,
                 real *of_vectors) {
  for (num m = 0; m < count; m++)
    if (has_vectors(s, panel + m)) {
      for (num r = 0; r < rows; r += ROWS)
        gather(ROWS, dim, PANEL, slopes + r * WINDOW + m * PANEL, WINDOW, 1, vectors + (panel + m) * PANEL * dim, of_q + r * dim);
      scatter(dim, rows, slopes + m * PANEL, WINDOW, q, of_vectors + (panel + m) * PANEL * dim);
    }
  for (num r = 0; r < rows; r++, slopes += WINDOW) {
    memmove(slopes, slopes + count * PANEL, (WINDOW - count * PANEL) * sizeof(real));
    memset(slopes + WINDOW - count * PANEL, 0, count * PANEL * sizeof(real));
  }
}
