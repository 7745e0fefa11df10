/* A bias that is a piecewise linear function of a distance times a number of the query's (FIRE), in a tile: `NormalizedOffset`
   defines it. A head's curve is [3, pieces]: slopes, levels, and the ends of the pieces, the last of them infinite. Distances of
   a row, along diagonals, fall up to the nearest one and rise behind it. */
#pragma once
#include "counted.h"

typedef struct { const real *slopes, *levels, *ends; num pieces; } Curve;
typedef struct { num first, last; } Pieces; /* that some keys have */

INLINE Curve curve_of(const Shape *s, num head) {
  const real *at = s->curves + 3 * s->pieces * head;
  return (Curve){at, at + s->pieces, at + 2 * s->pieces, s->pieces};
}

/* The distances of a head in `tabulate`'s places, those at both ends repeated beyond them; returns the nearest. */
static num lay_distances(const real *table, num diagonals, num margin, num length, real *to) {
  num nearest = 0;
  for (num n = 0; n < length; n++) {
    to[n] = table[most(0, least(n - margin, diagonals - 1))];
    nearest = to[n] < to[nearest] ? n : nearest;
  }
  return nearest;
}

static num piece_of(const Curve *c, real t, num from) {
  while (from < c->pieces - 1 && c->ends[from] < t) from++;
  while (from > 0 && !(c->ends[from - 1] < t)) from--;
  return from;
}

/* Adds the bias to `wide` vectors of scores. nearest: as if the first distance had the place 0. Returns the pieces of these keys, for
   backward and as what to begin with in the next tile. */
static Pieces bend(const Curve *c, const real *distances, real rate, num nearest, Pieces found, vec *x, int wide) {
  num keys = wide * WIDE;
  real begin = distances[0], end = distances[keys - 1], low = begin < end ? begin : end;
  if (nearest > 0 && nearest < keys) low = distances[nearest];
  found.first = piece_of(c, low * rate, found.first);
  found.last = piece_of(c, (begin < end ? end : begin) * rate, found.first);
  for (int w = 0; w < wide; w++) {
    vec t = *(const vec *)(distances + w * WIDE) * rate, y = c->slopes[found.first] * t + c->levels[found.first];
    for (num m = found.first; m < found.last; m++) y = either(t > c->ends[m], c->slopes[m + 1] * t + c->levels[m + 1], y);
    x[w] += y * LOG2E;
  }
  return found;
}

/* Backward of that: y, gradients of `wide` vectors of scores. Adds to of_curve, vectors of [2, pieces], whose lanes sum to the
   gradients of slopes and levels, and to those of the distances; returns that of the rate. */
static real unbend(const Curve *c, const real *distances, real rate, Pieces found, const vec *y, int wide, vec *of_curve,
                   real *of_distances) {
  vec of_rate = SAME(0);
  for (int w = 0; w < wide; w++) {
    vec distance = *(const vec *)(distances + w * WIDE), t = distance * rate, slope = SAME(c->slopes[found.first]), rest = y[w];
    for (num m = found.first; m < found.last; m++) {
      ivec beyond = t > c->ends[m];
      vec own = either(beyond, SAME(0), rest);
      of_curve[m] += own * t, of_curve[c->pieces + m] += own;
      rest = either(beyond, rest, SAME(0)), slope = either(beyond, SAME(c->slopes[m + 1]), slope);
    }
    of_curve[found.last] += rest * t, of_curve[c->pieces + found.last] += rest;
    slope *= y[w];
    *(vec *)(of_distances + w * WIDE) += slope * rate;
    of_rate += slope * distance;
  }
  return sum_of(of_rate);
}
