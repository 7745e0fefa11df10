/* A diagonal complex state, the same for all tokens: h_t = r h_{t-1} + B u_t, y_t = 2 Re(C h_t), and its gradients. */
#include "lanes.h"

/* u, y [batch, length, channels]; r, B, C [2, size, channels], real and imaginary parts; flags [batch, length] or NULL: 1 begins
   a document, 2 is padding; first, last [batch, 2, size, channels]. */
typedef struct { num batch, length, channels, size, chunk, threads; } Shape;
typedef struct { vec re, im; } complex;
enum { BEGINS = 1, PADDING = 2 };

INLINE num blocks_of(const Shape *s) { return (s->channels + LANES - 1) / LANES; }
INLINE complex pair(const real *at, const Shape *s, num n, int some) {
  return (complex){load(at + n * s->channels, some), load(at + (s->size + n) * s->channels, some)};
}
INLINE void put(real *at, const Shape *s, num n, complex x, int some) {
  store(at + n * s->channels, x.re, some);
  store(at + (s->size + n) * s->channels, x.im, some);
}
INLINE void numbers(const Shape *s, num c, int some, const real *r, const real *B, const real *C, complex *of) {
  for (num n = 0; n < s->size; n++) {
    of[3 * n] = pair(r + c, s, n, some);
    of[3 * n + 1] = pair(B + c, s, n, some);
    of[3 * n + 2] = pair(C + c, s, n, some);
  }
}
/* The state after a token, from that before. */
INLINE void next(num N, int flag, vec u, const complex *of, const complex *before, complex *after) {
  for (num n = 0; n < N; n++) {
    complex h = before[n], r = of[3 * n], b = of[3 * n + 1];
    if (flag & BEGINS) h = (complex){SAME(0), SAME(0)};
    if (!(flag & PADDING)) h = (complex){r.re * h.re - r.im * h.im + b.re * u, r.re * h.im + r.im * h.re + b.im * u};
    after[n] = h;
  }
}

INLINE void run(const Shape *s, num b, num c, int some, const real *u, const real *r, const real *B, const real *C,
                const unsigned char *flags, const real *first, real *y, real *last, complex *scratch) {
  num N = s->size, H = s->channels;
  complex *of = scratch, *h = of + 3 * N;
  numbers(s, c, some, r, B, C, of);
  for (num n = 0; n < N; n++) h[n] = pair(first + b * 2 * N * H + c, s, n, some);
  for (num t = 0; t < s->length; t++) {
    num at = b * s->length + t;
    vec out = {0};
    next(N, flags ? flags[at] : 0, load(u + at * H + c, some), of, h, h);
    for (num n = 0; n < N; n++) out += of[3 * n + 2].re * h[n].re - of[3 * n + 2].im * h[n].im;
    store(y + at * H + c, 2 * out, some);
  }
  for (num n = 0; n < N; n++) put(last + b * 2 * N * H + c, s, n, h[n], some);
}

typedef struct {
  const Shape *s;
  const real *u, *r, *B, *C;
  const unsigned char *flags;
  const real *first;
  real *y, *last;
} Forward;
static void forward_task(const void *call, num i, int worker) {
  const Forward *f = call;
  num b = i / blocks_of(f->s), c = i % blocks_of(f->s) * LANES, rest = f->s->channels - c;
  complex *scratch = aligned_alloc(64, 4 * f->s->size * sizeof(complex));
  if (rest >= LANES) run(f->s, b, c, LANES, f->u, f->r, f->B, f->C, f->flags, f->first, f->y, f->last, scratch);
  else run(f->s, b, c, (int)rest, f->u, f->r, f->B, f->C, f->flags, f->first, f->y, f->last, scratch);
  free(scratch);
}

void forward(const Shape *s, const real *u, const real *r, const real *B, const real *C, const unsigned char *flags,
             const real *first, real *y, real *last) {
  Forward call = {s, u, r, B, C, flags, first, y, last};
  in_parallel(forward_task, &call, s->batch * blocks_of(s), s->threads, s->threads);
}

/* A first pass stores the state before each chunk; then chunks are run again from the last to the first. */
INLINE void back(const Shape *s, num b, num c, int some, const real *u, const real *r, const real *B, const real *C,
                 const unsigned char *flags, const real *first, const real *gy, const real *glast, real *gu, real *gr,
                 real *gB, real *gC, real *gfirst, complex *scratch) {
  num N = s->size, H = s->channels, T = s->chunk, count = (s->length + T - 1) / T, state = b * 2 * N * H + c;
  complex *of = scratch, *g = of + 3 * N, *sums = g + N, *h = sums + 3 * N, *starts = h + (T + 1) * N;
  numbers(s, c, some, r, B, C, of);
  memset(sums, 0, 3 * N * sizeof(complex));
  for (num n = 0; n < N; n++) {
    g[n] = pair(glast + state, s, n, some);
    starts[n] = pair(first + state, s, n, some);
  }
  for (num t = 0; t < (count - 1) * T; t++) {
    num at = b * s->length + t;
    complex *after = starts + (t / T + 1) * N; /* overwritten by each token of a chunk, up to its last */
    next(N, flags ? flags[at] : 0, load(u + at * H + c, some), of, t % T ? after : after - N, after);
  }
  for (num chunk = count - 1; chunk >= 0; chunk--) {
    num from = chunk * T, to = from + T < s->length ? from + T : s->length;
    memcpy(h, starts + chunk * N, N * sizeof(complex));
    for (num t = from; t < to; t++) {
      num at = b * s->length + t;
      next(N, flags ? flags[at] : 0, load(u + at * H + c, some), of, h + (t - from) * N, h + (t - from + 1) * N);
    }
    for (num t = to - 1; t >= from; t--) {
      num at = b * s->length + t;
      int flag = flags ? flags[at] : 0;
      vec x = load(u + at * H + c, some), out = 2 * load(gy + at * H + c, some), of_u = {0};
      complex *before = h + (t - from) * N, *after = before + N;
      for (num n = 0; n < N; n++) {
        complex q = of[3 * n], p = of[3 * n + 1], o = of[3 * n + 2], d = g[n], old = before[n];
        complex *sum = sums + 3 * n;
        sum[2].re += out * after[n].re;
        sum[2].im -= out * after[n].im;
        d.re += out * o.re;
        d.im -= out * o.im;
        if (flag & BEGINS) old = (complex){SAME(0), SAME(0)};
        if (!(flag & PADDING)) {
          sum[1].re += d.re * x;
          sum[1].im += d.im * x;
          of_u += d.re * p.re + d.im * p.im;
          sum[0].re += d.re * old.re + d.im * old.im;
          sum[0].im += d.im * old.re - d.re * old.im;
          d = (complex){q.re * d.re + q.im * d.im, q.re * d.im - q.im * d.re};
        }
        if (flag & BEGINS) d = (complex){SAME(0), SAME(0)};
        g[n] = d;
      }
      store(gu + at * H + c, of_u, some);
    }
  }
  for (num n = 0; n < N; n++) {
    put(gr + state, s, n, sums[3 * n], some);
    put(gB + state, s, n, sums[3 * n + 1], some);
    put(gC + state, s, n, sums[3 * n + 2], some);
    put(gfirst + state, s, n, g[n], some);
  }
}

/* gr, gB, gC [batch, 2, size, channels]: their sums over rows are left to the caller. */
typedef struct {
  const Shape *s;
  const real *u, *r, *B, *C;
  const unsigned char *flags;
  const real *first, *gy, *glast;
  real *gu, *gr, *gB, *gC, *gfirst;
} Backward;
static void backward_task(const void *call, num i, int worker) {
  const Backward *a = call;
  const Shape *s = a->s;
  num chunks = (s->length + s->chunk - 1) / s->chunk;
  num b = i / blocks_of(s), c = i % blocks_of(s) * LANES, rest = s->channels - c;
  complex *scratch = aligned_alloc(64, s->size * (8 + s->chunk + chunks) * sizeof(complex));
  if (rest >= LANES)
    back(s, b, c, LANES, a->u, a->r, a->B, a->C, a->flags, a->first, a->gy, a->glast, a->gu, a->gr, a->gB, a->gC, a->gfirst, scratch);
  else
    back(s, b, c, (int)rest, a->u, a->r, a->B, a->C, a->flags, a->first, a->gy, a->glast, a->gu, a->gr, a->gB, a->gC, a->gfirst,
         scratch);
  free(scratch);
}

void backward(const Shape *s, const real *u, const real *r, const real *B, const real *C, const unsigned char *flags,
              const real *first, const real *gy, const real *glast, real *gu, real *gr, real *gB, real *gC, real *gfirst) {
  Backward call = {s, u, r, B, C, flags, first, gy, glast, gu, gr, gB, gC, gfirst};
  in_parallel(backward_task, &call, s->batch * blocks_of(s), s->threads, s->threads);
}
