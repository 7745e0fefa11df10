/* Attention along diagonals: what forward.py and backward.py do where nothing but a table of offsets is added, in one pass.

   A block of queries meets the panels of keys one after the other; a tile of scores is made, turned into weights and used while
   it is in the cache's first level or in registers. Queries are not reversed here: query a and key b meet at diagonal
   n = queries - 1 - a + b, allowed from `first` to `last`. Scores are in base 2. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef DOUBLE
typedef double real;
typedef int64_t bits;
#define REAL_BITS 64
#else
typedef float real;
typedef int32_t bits;
#define REAL_BITS 32
#endif

#if defined(__AVX512F__)
#define VECTOR_BITS 512
#elif defined(__AVX__)
#define VECTOR_BITS 256
#else
#define VECTOR_BITS 128
#endif
#define WIDE (VECTOR_BITS / REAL_BITS) /* numbers in a vector */
#if defined(__AVX512F__) || defined(__aarch64__)
#define ACROSS 4 /* vectors side by side: with ROWS of them, as many sums as there are registers */
#else
#define ACROSS 2
#endif
#define PANEL (ACROSS * WIDE) /* keys at once */
#define ROWS 6                /* queries whose sums stay in registers */
#define BLOCK 48              /* queries that use a panel while it is near */
#define MARGIN (PANEL + BLOCK)
#define LOG2E ((real)1.4426950408889634)
#define INLINE static inline __attribute__((always_inline))

typedef real vec __attribute__((vector_size(VECTOR_BITS / 8), aligned(REAL_BITS / 8), may_alias));
typedef bits ivec __attribute__((vector_size(VECTOR_BITS / 8), aligned(REAL_BITS / 8), may_alias));
typedef int64_t num;
typedef struct { const real *at; num batch, head, row; } In; /* [B, H, L, D], strides in numbers, that of D is 1 */
typedef struct { real *at; num batch, head, row, split; } Out;

typedef struct {
  num batch, heads, groups, queries, keys, dim, first, last, splits; /* groups: queries' heads to a head of keys */
  double scale, enough; /* 2^-enough of the largest weight is nothing */
  int threads;
} Shape;

INLINE num least(num a, num b) { return a < b ? a : b; }
INLINE num most(num a, num b) { return a > b ? a : b; }
INLINE num up(num n, num step) { return (n + step - 1) / step * step; }

/* ---- vectors ---- */
#define SAME(x) ((vec)((vec){0} + (real)(x)))
#if WIDE == 16
#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif WIDE == 8
#define LANE ((ivec){0, 1, 2, 3, 4, 5, 6, 7})
#elif WIDE == 4
#define LANE ((ivec){0, 1, 2, 3})
#else
#define LANE ((ivec){0, 1})
#endif

INLINE vec larger(vec a, vec b) { /* b where either is NaN */
  ivec which = a > b;
  return (vec)((which & (ivec)a) | (~which & (ivec)b));
}

INLINE real highest_of(vec x) {
  for (int half = WIDE / 2; half; half /= 2) x = larger(x, __builtin_shuffle(x, LANE ^ half));
  return x[0];
}

INLINE real sum_of(vec x) {
  for (int half = WIDE / 2; half; half /= 2) x += __builtin_shuffle(x, LANE ^ half);
  return x[0];
}

/* 2^x = 2^whole 2^rest; 0 below the ordinary numbers, NaN of NaN. The polynomial is right to 8e-8, for double to 1e-16. */
INLINE vec power(vec x) {
#ifdef DOUBLE
  static const real c[] = {1.3691488853904128e-12, 2.5678435993488202e-11, 4.44553827187081e-10, 7.054911620801123e-09,
                           1.0178086009239699e-07, 1.3215486790144307e-06, 1.5252733804059841e-05, 1.5403530393381608e-04,
                           1.333355814642844e-03,  9.618129107628477e-03,  5.550410866482158e-02,  2.402265069591007e-01,
                           6.931471805599453e-01,  1};
  const real round = 6755399441055744.0; /* 1.5 2^52: what is added to it loses its fraction */
  const int mantissa = 52, bias = 1023;
#else
  static const real c[] = {1.3276489593740488e-3f, 9.675541634742987e-3f, 5.550713229265456e-2f,
                           2.4022119721828453e-1f, 6.931469670715228e-1f, 1};
  const real round = 12582912; /* 1.5 2^23 */
  const int mantissa = 23, bias = 127;
#endif
  x = larger(SAME(-bias), x);
  vec whole = x + round, rest = x - (whole - round), y = SAME(c[0]);
  union { real number; bits as; } zero = {round};
  ivec two = (ivec)whole - (zero.as - bias);
#pragma GCC unroll 16
  for (int i = 1; i < (int)(sizeof c / sizeof *c); i++) y = y * rest + c[i];
  return y * (vec)(two << mantissa);
}

/* c[r][:] = start[r][:] + sum over k of a[r row + k col] b[k][:] for `rows` rows of `wide` vectors, known when compiled. */
INLINE void sums(const int rows, const int wide, num n, const real *a, num row, num col, const real *b, num next,
                 const real *start, num first, real *c, num stride) {
  vec sum[ROWS][ACROSS], other[ACROSS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) sum[r][v] = start ? *(const vec *)(start + r * first + v * WIDE) : SAME(0);
  for (num k = 0; k < n; k++) {
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) other[v] = *(const vec *)(b + k * next + v * WIDE);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      real x = a[r * row + k * col];
#pragma GCC unroll 4
      for (int v = 0; v < wide; v++) sum[r][v] += x * other[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < wide; v++) *(vec *)(c + r * stride + v * WIDE) = sum[r][v];
}

#define WITH n, a, row, col, b, next, start, first, c, stride
static void product(int rows, int wide, num n, const real *a, num row, num col, const real *b, num next, const real *start,
                    num first, real *c, num stride) {
  if (rows == ROWS) {
    if (wide == ACROSS) sums(ROWS, ACROSS, WITH);
    else if (wide == 1) sums(ROWS, 1, WITH);
    else if (wide == 2) sums(ROWS, 2, WITH);
    else sums(ROWS, ACROSS - 1, WITH);
  } else { /* what ROWS leave of a PANEL */
    if (wide == ACROSS) sums(PANEL % ROWS, ACROSS, WITH);
    else if (wide == 1) sums(PANEL % ROWS, 1, WITH);
    else if (wide == 2) sums(PANEL % ROWS, 2, WITH);
    else sums(PANEL % ROWS, ACROSS - 1, WITH);
  }
}

/* c[r][:] += sum over k of a[r row + k col] b[k][:], rows of b and c `dim` wide. */
INLINE void gather(int rows, num dim, num n, const real *a, num row, num col, const real *b, real *c) {
  for (num x = 0; x < dim; x += PANEL)
    product(rows, (int)(least(dim - x, PANEL) / WIDE), n, a, row, col, b + x, dim, c + x, dim, c + x, dim);
}

/* The same for the PANEL keys that are the columns of a [n, PANEL]. */
INLINE void scatter(num dim, num n, const real *a, const real *b, real *c) {
  num r = 0;
  for (; r + ROWS <= PANEL; r += ROWS) gather(ROWS, dim, n, a + r, 1, PANEL, b, c + r * dim);
  gather(PANEL % ROWS, dim, n, a + r, 1, PANEL, b, c + r * dim);
}

/* ---- a head's numbers, side by side ---- */

/* Keys x [keys, dim] -> [panels, wide, PANEL], and the length of the longest key of each panel, NaN where one is not finite. */
static void lay_across(const real *x, num row, num keys, num dim, num wide, real *to, real *longest) {
  for (num b = 0; b < up(keys, PANEL); b += WIDE) {
    real *across = to + b / PANEL * wide * PANEL + b % PANEL, *length = longest + b / PANEL;
    vec square = SAME(0);
    for (num i = 0; i < WIDE; i++) {
      num some = b + i < keys ? dim : 0;
      for (num d = 0; d < some; d++) across[d * PANEL + i] = x[(b + i) * row + d];
      for (num d = some; d < wide; d++) across[d * PANEL + i] = 0;
    }
    for (num d = 0; d < wide; d++) square += *(vec *)(across + d * PANEL) * *(vec *)(across + d * PANEL);
    real here = (real)sqrt(highest_of(square)) + 0 * sum_of(square);
    if (b % PANEL == 0 || here > *length || here != here) *length = here;
  }
}

/* x [count, dim] times factor -> [rows, wide], with zeros; the length of the longest row. */
static real lay_down(const real *x, num row, num count, num rows, num dim, num wide, real factor, real *to) {
  real longest = 0;
  for (num r = 0; r < rows; r++, to += wide) {
    num some = r < count ? dim : 0;
    vec square = SAME(0);
    for (num d = 0; d < some; d++) to[d] = x[r * row + d] * factor;
    for (num d = some; d < wide; d++) to[d] = 0;
    for (num d = 0; d < wide; d += WIDE) square += *(vec *)(to + d) * *(vec *)(to + d);
    real here = sum_of(square);
    longest = here > longest || here != here ? here : longest;
  }
  return (real)sqrt(longest);
}

/* The table of a head (null: zeros) in base 2, -inf where nobody may look, MARGIN more on both sides; the highest of each PANEL. */
static void tabulate(const Shape *s, const real *table, real *to, real *highest) {
  num length = up(s->queries + s->keys - 1 + 2 * MARGIN, PANEL);
  for (num n = -MARGIN; n < length - MARGIN; n++)
    to[n + MARGIN] = n < s->first || n > s->last ? -INFINITY : table ? table[n] * LOG2E : 0;
  for (num p = 0; p < length; p += PANEL) {
    real high = -INFINITY;
    for (num i = 0; i < PANEL; i++) high = to[p + i] > high ? to[p + i] : high;
    highest[p / PANEL] = high;
  }
}

/* What no bias of ROWS queries from a on and the panel at key b exceeds. */
INLINE real highest_bias(const Shape *s, const real *highest, num a, num b) {
  num from = (MARGIN + s->queries - a - ROWS + b) / PANEL, to = (MARGIN + s->queries - 1 - a + b + PANEL - 1) / PANEL;
  real high = highest[from];
  for (num p = from + 1; p <= to; p++) high = highest[p] > high ? highest[p] : high;
  return high;
}

/* The keys low .. high - 1 are those that query a sees. */
INLINE num low_key(const Shape *s, num a) { return most(0, s->first - (s->queries - 1 - a)); }
INLINE num high_key(const Shape *s, num a) { return least(s->keys, s->last - (s->queries - 1 - a) + 1); }

/* Scores [ROWS, PANEL] of queries from a on and `wide` vectors of keys from b on; -inf where nobody may look. */
INLINE void score(const Shape *s, const real *q, num dim, const real *keys, const real *table, num a, num b, int wide,
                  int finite, real *to) {
  product(ROWS, wide, dim, q, dim, 1, keys, PANEL, table + MARGIN + s->queries - 1 - a + b, -1, to, PANEL);
  if (finite && b + wide * WIDE <= s->keys) return; /* the table has said where nobody may look */
  for (num r = 0; r < ROWS; r++)                    /* keys that are not there; and -inf and NaN do not add up to -inf */
    for (num i = 0; i < wide * WIDE; i++)
      if (b + i < low_key(s, a + r) || b + i >= high_key(s, a + r)) to[r * PANEL + i] = -INFINITY;
}
#define FINITE(bound) ((bound) < (real)1e30)
#define NOTHING_YET ((real)-1e38) /* lower than any score that is not -inf */

typedef struct { num dim, head, panels, table, blocks, tasks, shared; } Sizes;
static Sizes sizes(const Shape *s) {
  num dim = up(s->dim, WIDE), keys = up(s->keys, PANEL), shared = s->heads / s->groups;
  return (Sizes){dim, keys * dim, keys / PANEL, up(s->queries + s->keys - 1 + 2 * MARGIN, PANEL),
                 (s->queries + BLOCK - 1) / BLOCK, s->batch * shared * s->splits, shared};
}

/* ---- forward ---- */

/* Numbers of room that each thread needs. */
num forward_room(const Shape *s) {
  Sizes n = sizes(s);
  return 2 * n.head + n.panels + 2 * n.table + 2 * BLOCK * n.dim + ROWS * PANEL + 2 * BLOCK;
}

/* lse [B, H, Lq]. A task is a head of keys and a share of the blocks of its queries. */
void forward(const Shape *s, In q, In k, In v, const real *table, num table_row, Out out, real *lse, real *room) {
  Sizes size = sizes(s);
  num dim = size.dim;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
  for (num task = 0; task < size.tasks; task++) {
    num n = task / s->splits / size.shared, h = task / s->splits % size.shared;
    real *keys = room + omp_get_thread_num() * forward_room(s), *values = keys + size.head, *longest = values + size.head;
    real *biases = longest + size.panels, *highest = biases + size.table, *queries = highest + size.table;
    real *made = queries + BLOCK * dim, *tile = made + BLOCK * dim, *top = tile + ROWS * PANEL, *total = top + BLOCK;
    lay_across(k.at + n * k.batch + h * k.head, k.row, s->keys, s->dim, dim, keys, longest);
    lay_down(v.at + n * v.batch + h * v.head, v.row, s->keys, up(s->keys, PANEL), s->dim, dim, 1, values);
    for (num g = h * s->groups; g < (h + 1) * s->groups; g++) {
      tabulate(s, table ? table + g * table_row : 0, biases, highest);
      for (num turn = task % s->splits; turn < size.blocks; turn += s->splits) {
        num a = (size.blocks - 1 - turn) * BLOCK, rows = least(BLOCK, s->queries - a); /* the longest rows first */
        const real *from_q = q.at + n * q.batch + g * q.head + a * q.row;
        real length = lay_down(from_q, q.row, rows, BLOCK, s->dim, dim, (real)s->scale * LOG2E, queries);
        memset(made, 0, BLOCK * dim * sizeof(real));
        for (num r = 0; r < BLOCK; r++) top[r] = NOTHING_YET, total[r] = 0;
        num low = low_key(s, a), high = high_key(s, a + rows - 1);
        for (num b = up(high, PANEL) - PANEL; b >= 0 && b + PANEL > low && high > low; b -= PANEL) { /* near keys first */
          real bound = length * longest[b / PANEL];
          for (num r = 0; r < rows; r += ROWS) {
            num last = least(r + ROWS, rows), from = most(low_key(s, a + r) - b, 0);
            num to = least(high_key(s, a + last - 1) - b, PANEL), skip = from / WIDE * WIDE;
            if (from >= to) continue;
            real lowest = top[r];
            for (num i = r + 1; i < last; i++) lowest = top[i] < lowest ? top[i] : lowest;
            if (bound + highest_bias(s, highest, a + r, b) < lowest - (real)s->enough) continue;
            int wide = (int)((to - skip + WIDE - 1) / WIDE);
            score(s, queries + r * dim, dim, keys + b * dim + skip, biases, a + r, b + skip, wide, FINITE(bound), tile);
            for (num i = r; i < last; i++) {
              vec *x = (vec *)(tile + (i - r) * PANEL), high = x[0], sum = SAME(0);
              for (int w = 1; w < wide; w++) high = larger(x[w], high);
              real now = highest_of(high);
              if (now > top[i]) {
                real fade = power(SAME(top[i] - now))[0];
                for (num d = 0; d < dim; d += WIDE) *(vec *)(made + i * dim + d) *= fade;
                total[i] *= fade;
                top[i] = now;
              }
              for (int w = 0; w < wide; w++) sum += x[w] = power(x[w] - top[i]);
              total[i] += sum_of(sum);
            }
            gather(ROWS, dim, to - from, tile + from - skip, PANEL, 1, values + (b + from) * dim, made + r * dim);
          }
        }
        for (num r = 0; r < rows; r++) {
          real *to = out.at + n * out.batch + g * out.head + (a + r) * out.row;
          int sees = low_key(s, a + r) < high_key(s, a + r);
          for (num d = 0; d < s->dim; d++) to[d] = sees ? made[r * dim + d] / total[r] : 0;
          lse[(n * s->heads + g) * s->queries + a + r] =
              !sees ? -INFINITY : total[r] == 0 ? NAN : (top[r] + (real)log2(total[r])) / LOG2E;
        }
      }
    }
  }
}

/* ---- backward ---- */
num backward_room(const Shape *s) {
  Sizes n = sizes(s);
  return 5 * n.head + 2 * n.panels + 3 * n.table + 3 * BLOCK * n.dim + 2 * BLOCK * PANEL + 2 * BLOCK;
}

/* lse and minus_delta [B, H, Lq], -(grad . out) and what comes through lse; grad_table [splits, B, H, diagonals] or null. */
void backward(const Shape *s, In grad, In q, In k, In v, const real *table, num table_row, const real *lse,
              const real *minus_delta, Out grad_q, Out grad_k, Out grad_v, real *grad_table, real *room) {
  Sizes size = sizes(s);
  num dim = size.dim, diagonals = s->queries + s->keys - 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads)
  for (num task = 0; task < size.tasks; task++) {
    num n = task / s->splits / size.shared, h = task / s->splits % size.shared, split = task % s->splits;
    real *keys = room + omp_get_thread_num() * backward_room(s), *values = keys + size.head, *flat = values + size.head;
    real *made_k = flat + size.head, *made_v = made_k + size.head, *longest = made_v + size.head;
    real *biases = longest + 2 * size.panels, *highest = biases + size.table, *made_table = highest + size.table;
    real *queries = made_table + size.table, *grads = queries + BLOCK * dim, *made = grads + BLOCK * dim;
    real *weights = made + BLOCK * dim, *slopes = weights + BLOCK * PANEL, *ends = slopes + BLOCK * PANEL;
    real *delta = ends + BLOCK;
    const real *from_k = k.at + n * k.batch + h * k.head, *from_v = v.at + n * v.batch + h * v.head;
    lay_across(from_k, k.row, s->keys, s->dim, dim, keys, longest);
    lay_across(from_v, v.row, s->keys, s->dim, dim, values, longest + size.panels);
    lay_down(from_k, k.row, s->keys, up(s->keys, PANEL), s->dim, dim, 1, flat);
    memset(made_k, 0, 2 * size.head * sizeof(real));
    for (num g = h * s->groups; g < (h + 1) * s->groups; g++) {
      tabulate(s, table ? table + g * table_row : 0, biases, highest);
      memset(made_table, 0, size.table * sizeof(real));
      for (num turn = split; turn < size.blocks; turn += s->splits) {
        num a = turn * BLOCK, rows = least(BLOCK, s->queries - a), at = (n * s->heads + g) * s->queries + a;
        const real *from_q = q.at + n * q.batch + g * q.head + a * q.row;
        const real *from_grad = grad.at + n * grad.batch + g * grad.head + a * grad.row;
        real length = lay_down(from_q, q.row, rows, BLOCK, s->dim, dim, (real)s->scale * LOG2E, queries);
        lay_down(from_grad, grad.row, rows, BLOCK, s->dim, dim, 1, grads);
        memset(made, 0, BLOCK * dim * sizeof(real));
        for (num r = 0; r < BLOCK; r++) {
          int sees = r < rows && lse[at + r] != -INFINITY;
          ends[r] = sees ? lse[at + r] * LOG2E : INFINITY;
          delta[r] = sees ? minus_delta[at + r] : 0;
        }
        num low = low_key(s, a), high = high_key(s, a + rows - 1);
        for (num b = low / PANEL * PANEL; b < high; b += PANEL) {
          num first = BLOCK, last = 0; /* the queries for which this panel counts */
          real bound = length * longest[b / PANEL];
          for (num r = 0; r < rows; r += ROWS) {
            real *weight = weights + r * PANEL, *slope = slopes + r * PANEL, end = ends[r];
            for (num i = r + 1; i < r + ROWS; i++) end = ends[i] < end ? ends[i] : end;
            num from = most(low_key(s, a + r) - b, 0), to = least(high_key(s, a + r + ROWS - 1) - b, PANEL);
            if (from >= to || bound + highest_bias(s, highest, a + r, b) < end - (real)s->enough) {
              memset(weight, 0, ROWS * PANEL * sizeof(real));
              memset(slope, 0, ROWS * PANEL * sizeof(real));
              continue;
            }
            first = least(first, r), last = r + ROWS;
            score(s, queries + r * dim, dim, keys + b * dim, biases, a + r, b, ACROSS, FINITE(bound), weight);
            product(ROWS, ACROSS, dim, grads + r * dim, dim, 1, values + b * dim, PANEL, 0, 0, slope, PANEL);
            real *diagonal = made_table + MARGIN + s->queries - 1 - a - r + b;
            for (num i = 0; i < ROWS; i++, diagonal--)
              for (num w = 0; w < PANEL; w += WIDE) {
                vec *x = (vec *)(weight + i * PANEL + w), *y = (vec *)(slope + i * PANEL + w);
                *x = power(*x - ends[r + i]);
                *y = *x * (*y + delta[r + i]);
                if (grad_table) *(vec *)(diagonal + w) += *y;
              }
            gather(ROWS, dim, to - from, slope + from, PANEL, 1, flat + (b + from) * dim, made + r * dim);
          }
          if (first >= last) continue;
          scatter(dim, last - first, weights + first * PANEL, grads + first * dim, made_v + b * dim);
          scatter(dim, last - first, slopes + first * PANEL, queries + first * dim, made_k + b * dim);
        }
        for (num r = 0; r < rows; r++) {
          real *to = grad_q.at + n * grad_q.batch + g * grad_q.head + (a + r) * grad_q.row;
          for (num d = 0; d < s->dim; d++) to[d] = made[r * dim + d] * (real)s->scale;
        }
      }
      if (grad_table)
        memcpy(grad_table + ((split * s->batch + n) * s->heads + g) * diagonals, made_table + MARGIN,
               diagonals * sizeof(real));
    }
    for (num b = 0; b < s->keys; b++) {
      real *to_k = grad_k.at + split * grad_k.split + n * grad_k.batch + h * grad_k.head + b * grad_k.row;
      real *to_v = grad_v.at + split * grad_v.split + n * grad_v.batch + h * grad_v.head + b * grad_v.row;
      for (num d = 0; d < s->dim; d++) to_k[d] = made_k[b * dim + d] / LOG2E, to_v[d] = made_v[b * dim + d];
    }
  }
}
