/* Vectors of offsets in a tile: score += q . vector at the diagonal, and output += weight vector. A block of queries is multiplied
   with a panel of diagonals at a time, and a tile reads the products a number further in each row. Gradients of scores, and
   weights, are added up by diagonal in the same way before they are multiplied with vectors, or with queries for their gradients. */
#pragma once
#include "curved.h"

#define BLOCK 48 /* queries that use a panel while it is in the cache */
#define MARGIN (3 * PANEL + BLOCK)
#define SKEWED ((BLOCK + 3 * PANEL - 3) / PANEL) /* panels of diagonals that a block and a panel of keys meet at */
#define WINDOW (SKEWED * PANEL)

/* A head's vectors of keys or of values, as a thread keeps them: across panels and down, from the panel `first` on, with zeros,
   and their gradient; `low` and `high`: the diagonals that have one, + MARGIN. [BLOCK, WINDOW] by diagonal from `panel` on,
   if any vector is `here`: products of a block, and sums that are not used yet. */
typedef struct { num dim, first, low, high, panel; real *across, *down, *made, *met, *apart, longest; int here; } Skew;

INLINE num panels_of(const Vectors *x) { return (x->count + 2 * PANEL - 2) / PANEL; }
INLINE num skew_space(const Vectors *x, num dim) { return x->at ? 3 * panels_of(x) * PANEL * dim + 2 * BLOCK * WINDOW : 0; }

static Skew lay_vectors(const Shape *s, const Vectors *x, num head, num width, num dim, real *space) {
  if (!x->at) return (Skew){0};
  num first = (s->near + MARGIN) / PANEL, size = panels_of(x) * PANEL * dim;
  Skew v = {dim, first, most(s->first, s->near) + MARGIN, least(s->last + 1, s->near + x->count) + MARGIN, 0, space, space + size,
            space + 2 * size, space + 3 * size, space + 3 * size + BLOCK * WINDOW, 0, 0};
  const real *from = x->at + head * x->head;
  memset(space, 0, skew_space(x, dim) * sizeof(real));
  for (num m = 0; m < x->count; m++, from += width) {
    num p = m + s->near + MARGIN - first * PANEL;
    real square = 0;
    for (num d = 0; d < width; d++) {
      v.across[p / PANEL * dim * PANEL + d * PANEL + p % PANEL] = v.down[p * dim + d] = from[d];
      square += from[d] * from[d];
    }
    v.longest = square > v.longest || square != square ? square : v.longest;
  }
  v.longest = (real)sqrt(v.longest);
  return v;
}

/* Whether any diagonal of some panels has a vector and is allowed; the panels of a tile, and whether those before had any. */
INLINE int has_vectors(const Skew *v, num panel, num panels) { return panel * PANEL < v->high && (panel + panels) * PANEL > v->low; }
INLINE int enter(Skew *v, num panel) {
  int before = v->here;
  if ((v->here = has_vectors(v, panel, SKEWED))) v->panel = panel;
  return before;
}

/* q . vector + bias of `rows` queries, from a panel on. way: 1 or -1, as panels move from call to call; those of before are moved. */
static void meet(Skew *v, const real *q, num rows, const real *biases, num panel, int way) {
  int before = enter(v, panel);
  for (num r = 0; v->here && before && r < rows; r++)
    memmove(v->met + r * WINDOW + (way < 0 ? PANEL : 0), v->met + r * WINDOW + (way < 0 ? 0 : PANEL), (WINDOW - PANEL) * sizeof(real));
  for (num m = before && way > 0 ? SKEWED - 1 : 0; v->here && m < (before && way < 0 ? 1 : SKEWED); m++)
    for (num r = 0; r < rows; r += ROWS)
      product(ROWS, VECTORS, has_vectors(v, panel + m, 1) ? v->dim : 0, q + r * v->dim, v->dim, 1,
              v->across + (panel + m - v->first) * v->dim * PANEL, PANEL, biases ? biases + (panel + m) * PANEL : 0, 0,
              v->met + r * WINDOW + m * PANEL, WINDOW);
}

/* Sums by diagonal: the panel that no later tile meets (way 0: all) is multiplied with vectors, into `made`, or with what the rows are
   multiplied with, q, into the vectors' gradient, and left. */
static void part(Skew *v, num rows, num panel, int way, real *made, const real *q) {
  real *sums = v->apart;
  for (num m = way < 0 ? SKEWED - 1 : 0; m < (way > 0 ? 1 : SKEWED); m++)
    if (has_vectors(v, panel + m, 1)) {
      num at = (panel + m - v->first) * PANEL * v->dim;
      for (num r = 0; made && r < rows; r += ROWS)
        gather(ROWS, v->dim, PANEL, sums + r * WINDOW + m * PANEL, WINDOW, 1, v->down + at, made + r * v->dim);
      if (q) scatter(v->dim, 0, PANEL, rows, sums + m * PANEL, WINDOW, q, v->made + at);
    }
  for (num r = 0; r < rows; r++, sums += WINDOW) {
    num kept = way ? WINDOW - PANEL : 0;
    memmove(sums + (way < 0 ? PANEL : 0), sums + (way > 0 ? PANEL : 0), kept * sizeof(real));
    memset(sums + (way > 0 ? kept : 0), 0, (WINDOW - kept) * sizeof(real));
  }
}

/* The end of a block: what is left of the sums, of panels behind the last one. */
static void rest(Skew *v, num rows, int way, real *made, const real *q) {
  if (v->panel) part(v, rows, v->panel + way, 0, made, q);
  v->here = 0, v->panel = 0;
}

/* Adds the gradient of a head to those of all. */
static void give(const Skew *v, const Vectors *x, num near, num head, num width, real over) {
  for (num m = 0; m < x->count; m++)
    for (num d = 0; d < width; d++)
      x->grad[(head * x->count + m) * width + d] += v->made[(m + near + MARGIN - v->first * PANEL) * v->dim + d] / over;
}
