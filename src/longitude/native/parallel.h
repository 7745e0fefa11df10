/* Tasks on the threads of torch's own pool. A library of ours links to no OpenMP runtime: each has a pool, and threads of one that
   wait by spinning take the processor from the other's. load.py says where the runtime of torch has its `GOMP_parallel`. */
#pragma once
#include <stdint.h>

typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned); /* calls a function on at most this number of threads, and waits */
static Team team;
void use_team(Team of_torch) { team = of_torch; }

typedef void (*Body)(const void *call, int64_t task, int worker); /* worker: 0 .. threads - 1, another one in each thread */
typedef struct { Body body; const void *call; int64_t count, each, next; int workers; } Loop;

static void take_tasks(void *loop) {
  Loop *all = loop;
  int worker = __atomic_fetch_add(&all->workers, 1, __ATOMIC_RELAXED);
  for (;;) {
    int64_t first = __atomic_fetch_add(&all->next, all->each, __ATOMIC_RELAXED);
    if (first >= all->count) return;
    for (int64_t i = first; i < first + all->each && i < all->count; i++) all->body(all->call, i, worker);
  }
}

/* The tasks 0 .. count - 1, handed out in `shares` of neighbours; 0: one by one. */
static void in_parallel(Body body, const void *call, int64_t count, int64_t shares, int64_t threads) {
  Loop all = {body, call, count, shares ? (count + shares - 1) / shares : 1, 0, 0};
  if (team && threads > 1 && count > all.each) team(take_tasks, &all, (unsigned)threads, 0);
  else take_tasks(&all);
}
