/* The selective scan, h_t = exp(dt_t A) h_{t-1} + x_t B_t, y_t = C_t h_t, and its gradients: states stay in the cache. */
#include "lanes.h"

/* dt, x, y [batch, length, groups, channels]; A [groups, size, channels]; B, C [batch, length, groups, size];
   keep [batch, length], 0 where a token begins a document, or NULL; first, last [batch, groups, size, channels]. */
typedef struct { num batch, length, groups, channels, size, chunk, threads; } Shape;

/* One task: `some` channels from c on, of group g of row b. */
typedef struct { num b, g, c; int some; } Task;

INLINE num tasks_of(const Shape *s) { return s->batch * s->groups * ((s->channels + LANES - 1) / LANES); }
INLINE Task task_of(const Shape *s, num i) {
  num blocks = (s->channels + LANES - 1) / LANES;
  Task t = {i / blocks / s->groups, i / blocks % s->groups, i % blocks * LANES, LANES};
  if (s->channels - t.c < LANES) t.some = (int)(s->channels - t.c);
  return t;
}
INLINE num token(const Shape *s, Task k, num t) { return (k.b * s->length + t) * s->groups + k.g; }
INLINE int kept(const unsigned char *keep, const Shape *s, Task k, num t) {
  return keep ? keep[k.b * s->length + t] : 1;
}
/* The state before a token, or its gradient: 0 where a document begins; chosen, because 0 times NaN would be NaN. */
INLINE vec before(vec h, int stay) { return stay ? h : (vec){0}; }

INLINE void run(const Shape *s, Task k, int some, const real *dt, const real *x, const real *A, const real *B, const real *C,
                const unsigned char *keep, const real *first, real *y, real *last, vec *h, vec *a) {
  num N = s->size, P = s->channels;
  for (num n = 0; n < N; n++) {
    a[n] = load(A + (k.g * N + n) * P + k.c, some);
    h[n] = load(first + ((k.b * s->groups + k.g) * N + n) * P + k.c, some);
  }
  for (num t = 0; t < s->length; t++) {
    num at = token(s, k, t);
    vec d = load(dt + at * P + k.c, some), u = load(x + at * P + k.c, some), out = {0};
    int stay = kept(keep, s, k, t);
    for (num n = 0; n < N; n++) {
      h[n] = exp_of(d * a[n]) * before(h[n], stay) + u * B[at * N + n];
      out += h[n] * C[at * N + n];
    }
    store(y + at * P + k.c, out, some);
  }
  for (num n = 0; n < N; n++) store(last + ((k.b * s->groups + k.g) * N + n) * P + k.c, h[n], some);
}

typedef struct {
  const Shape *s;
  const real *dt, *x, *A, *B, *C;
  const unsigned char *keep;
  const real *first;
  real *y, *last;
} Forward;
static void forward_task(const void *call, num i, int worker) {
  const Forward *f = call;
  Task k = task_of(f->s, i);
  num N = f->s->size;
  vec *scratch = aligned_alloc(64, 2 * N * sizeof(vec));
  if (k.some == LANES)
    run(f->s, k, LANES, f->dt, f->x, f->A, f->B, f->C, f->keep, f->first, f->y, f->last, scratch, scratch + N);
  else run(f->s, k, k.some, f->dt, f->x, f->A, f->B, f->C, f->keep, f->first, f->y, f->last, scratch, scratch + N);
  free(scratch);
}

void forward(const Shape *s, const real *dt, const real *x, const real *A, const real *B, const real *C,
             const unsigned char *keep, const real *first, real *y, real *last) {
  Forward call = {s, dt, x, A, B, C, keep, first, y, last};
  in_parallel(forward_task, &call, tasks_of(s), s->threads, s->threads);
}

/* A first pass stores the state after each chunk; then chunks are run again from the last to the first. gB, gC [tasks, length,
   size], gA [batch, groups, size, channels]: the caller sums over tasks and rows. */
INLINE void back(const Shape *s, Task k, int some, const real *dt, const real *x, const real *A, const real *B, const real *C,
                 const unsigned char *keep, const real *first, const real *gy, const real *glast, real *gdt, real *gx,
                 real *gA, real *gB, real *gC, real *gfirst, vec *scratch) {
  num N = s->size, P = s->channels, T = s->chunk, count = (s->length + T - 1) / T;
  vec *a = scratch, *g = a + N, *ga = g + N, *h = ga + N, *decay = h + (T + 1) * N, *starts = decay + T * N;
  num place = ((k.b * s->groups + k.g) * N) * P + k.c;
  for (num n = 0; n < N; n++) {
    a[n] = load(A + (k.g * N + n) * P + k.c, some);
    g[n] = load(glast + place + n * P, some);
    ga[n] = SAME(0);
    starts[n] = load(first + place + n * P, some);
  }
  for (num c = 0; c + 1 < count; c++) {
    vec *now = starts + (c + 1) * N;
    memcpy(now, now - N, N * sizeof(vec));
    for (num t = c * T; t < (c + 1) * T; t++) {
      num at = token(s, k, t);
      vec d = load(dt + at * P + k.c, some), u = load(x + at * P + k.c, some);
      int stay = kept(keep, s, k, t);
      for (num n = 0; n < N; n++) now[n] = exp_of(d * a[n]) * before(now[n], stay) + u * B[at * N + n];
    }
  }
  for (num c = count - 1; c >= 0; c--) {
    num from = c * T, to = from + T < s->length ? from + T : s->length;
    memcpy(h, starts + c * N, N * sizeof(vec));
    for (num t = from; t < to; t++) {
      num at = token(s, k, t);
      vec d = load(dt + at * P + k.c, some), u = load(x + at * P + k.c, some), *now = h + (t - from + 1) * N;
      int stay = kept(keep, s, k, t);
      for (num n = 0; n < N; n++) {
        vec e = exp_of(d * a[n]);
        decay[(t - from) * N + n] = e;
        now[n] = e * before(now[n - N], stay) + u * B[at * N + n];
      }
    }
    for (num t = to - 1; t >= from; t--) {
      num at = token(s, k, t);
      vec d = load(dt + at * P + k.c, some), u = load(x + at * P + k.c, some), out = load(gy + at * P + k.c, some);
      vec of_d = {0}, of_u = {0}, *now = h + (t - from + 1) * N;
      int stay = kept(keep, s, k, t);
      for (num m = 0; m < N; m += LANES) {
        int numbers = N - m < LANES ? (int)(N - m) : LANES;
        vec of_B[LANES] = {0}, of_C[LANES] = {0};
        for (int i = 0; i < numbers; i++) {
          num n = m + i;
          vec e = decay[(t - from) * N + n], here = g[n] + out * C[at * N + n];
          of_C[i] = out * now[n];
          of_B[i] = here * u;
          of_u += here * B[at * N + n];
          vec by_exponent = here * e * before(now[n - N], stay);
          g[n] = before(here * e, stay);
          of_d += by_exponent * a[n];
          ga[n] += by_exponent * d;
        }
        store(gB + t * N + m, sums_of(of_B), numbers);
        store(gC + t * N + m, sums_of(of_C), numbers);
      }
      store(gdt + at * P + k.c, of_d, some);
      store(gx + at * P + k.c, of_u, some);
    }
  }
  for (num n = 0; n < N; n++) {
    store(gA + place + n * P, ga[n], some);
    store(gfirst + place + n * P, g[n], some);
  }
}

typedef struct {
  const Shape *s;
  const real *dt, *x, *A, *B, *C;
  const unsigned char *keep;
  const real *first, *gy, *glast;
  real *gdt, *gx, *gA, *gB, *gC, *gfirst;
} Backward;
static void backward_task(const void *call, num i, int worker) {
  const Backward *b = call;
  const Shape *s = b->s;
  Task k = task_of(s, i);
  num chunks = (s->length + s->chunk - 1) / s->chunk;
  real *gB = b->gB + i * s->length * s->size, *gC = b->gC + i * s->length * s->size;
  vec *scratch = aligned_alloc(64, s->size * (4 + 2 * s->chunk + chunks) * sizeof(vec));
  if (k.some == LANES)
    back(s, k, LANES, b->dt, b->x, b->A, b->B, b->C, b->keep, b->first, b->gy, b->glast, b->gdt, b->gx, b->gA, gB, gC, b->gfirst,
         scratch);
  else
    back(s, k, k.some, b->dt, b->x, b->A, b->B, b->C, b->keep, b->first, b->gy, b->glast, b->gdt, b->gx, b->gA, gB, gC, b->gfirst,
         scratch);
  free(scratch);
}

void backward(const Shape *s, const real *dt, const real *x, const real *A, const real *B, const real *C,
              const unsigned char *keep, const real *first, const real *gy, const real *glast, real *gdt, real *gx,
              real *gA, real *gB, real *gC, real *gfirst) {
  Backward call = {s, dt, x, A, B, C, keep, first, gy, glast, gdt, gx, gA, gB, gC, gfirst};
  in_parallel(backward_task, &call, tasks_of(s), s->threads, s->threads);
}
