/* Positions that are counts (CoPE), in a tile: keys are counted by their gates, the newest first, and a score is raised by its query's logit at the count,
   between two columns linearly. `by_formula` of counted.py defines it. Where a count is full, all older keys have the last
   column. Logits are in base 2, as scores are, with the last column twice. */
#pragma once
#include "vectors.h"

typedef struct { vec gate, rest; ivec low; } Place; /* of a vector of keys: between the columns low and low + 1 */

INLINE vec either(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
INLINE vec read(const real *from, ivec at) {
  vec x;
  for (int i = 0; i < WIDE; i++) x[i] = from[at[i]];
  return x;
}

/* Sums over the lanes from each one on, and up to each one. */
INLINE vec sums_from(vec x) {
  for (int half = 1; half < WIDE; half *= 2) x += __builtin_shuffle(x, SAME(0), LANE + half);
  return x;
}
INLINE vec sums_to(vec x) {
  for (int half = 1; half < WIDE; half *= 2) x += __builtin_shuffle(SAME(0), x, LANE + (WIDE - half));
  return x;
}

/* Where the keys of some scores are, behind a count, and the count with them. A NaN is passed on by `rest`. */
INLINE Place place(vec x, real full, real *count) {
  ivec open = x > 0;
  vec less = power(either(open, -x, x)), gate = either(open, SAME(1), less) / (1 + less), counts = sums_from(gate) + *count;
  *count = counts[0];
  counts = either(counts > full, SAME(full), counts);
  ivec low = __builtin_convertvector(counts, ivec) & (counts >= 0);
  return (Place){gate, counts - __builtin_convertvector(low, vec), low};
}

/* Raises `wide` vectors of scores, behind a count; returns the count with them. at: their places, for backward. */
INLINE real raise(const real *logits, real full, real count, vec *x, int wide, Place *at) {
  for (int w = wide - 1; w >= 0; w--) {
    if (count >= full) {
      x[w] += logits[(num)full];
      if (at) at[w] = (Place){SAME(0), SAME(0), (ivec)SAME(0) + (bits)full};
      continue;
    }
    Place p = place(x[w], full, &count);
    vec below = read(logits, p.low);
    x[w] += below + p.rest * (read(logits, p.low + 1) - below);
    if (at) at[w] = p;
  }
  return count;
}

/* Backward of that: y, gradients of the scores, get what comes through the gates. One moves the counts of all keys up to its own:
   its gradient is their sum, of which `run` is that of the keys before. Adds to of_logits; returns the sum with these keys. */
INLINE real lower(const real *logits, real full, real count, const Place *at, real run, vec *y, int wide, real *of_logits) {
  if (count >= full) { /* no gate moves anything */
    vec sum = y[0];
    for (int w = 1; w < wide; w++) sum += y[w];
    of_logits[(num)full] += sum_of(sum);
    return run;
  }
  for (int w = 0; w < wide; w++) {
    vec change = read(logits, at[w].low + 1) - read(logits, at[w].low), above = y[w] * at[w].rest, below = y[w] - above;
    for (int i = 0; i < WIDE; i++) of_logits[at[w].low[i]] += below[i], of_logits[at[w].low[i] + 1] += above[i];
    vec sums = sums_to(either(at[w].rest == 0, SAME(0), y[w] * change / LOG2E)) + run;
    run = sums[WIDE - 1];
    y[w] += sums * at[w].gate * (1 - at[w].gate);
  }
  return run;
}
