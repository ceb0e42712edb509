/* A team of threads that run one function together, with barriers and shared work counters.
 *
 * Waiting spins for some microseconds, then sleeps in the kernel: an idle team costs nothing, and
 * a stage of a busy one costs no system call. One job at a time; callers queue on a mutex. */
#ifndef TRIPTYCH_POOL_H
#define TRIPTYCH_POOL_H

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_THREADS 64
#define SPINS 600

typedef struct {
    int index;      /* 0 is the caller */
    float *scratch; /* grown by scratch_for */
    size_t scratch_floats;
} Worker;

typedef void (*Job)(Worker *, void *);

static struct {
    pthread_mutex_t mutex;
    int size;
    pthread_t threads[MAX_THREADS];
    Worker workers[MAX_THREADS];
    Job job;
    void *arg;
    _Alignas(64) atomic_uint sequence; /* raised for each job */
    _Alignas(64) atomic_int next;      /* next chunk of the current stage */
    _Alignas(64) atomic_int arrived;
    atomic_uint phase; /* raised at each barrier */
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .size = 1};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Returns once *word differs from old. */
static void wait_change(atomic_uint *word, unsigned old) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) return;
        relax();
    }
    while (atomic_load_explicit(word, memory_order_acquire) == old)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
}

/* One waking call a change: the word itself tells a late sleeper not to sleep. */
static void change(atomic_uint *word) {
    atomic_fetch_add_explicit(word, 1, memory_order_release);
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

/* All threads of the team meet; the chunk counter is reset for the next stage. */
static void barrier(void) {
    if (pool.size == 1) {
        atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
        return;
    }
    unsigned phase = atomic_load_explicit(&pool.phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&pool.arrived, 1, memory_order_acq_rel) == pool.size - 1) {
        atomic_store_explicit(&pool.arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
        change(&pool.phase);
    } else {
        wait_change(&pool.phase, phase);
    }
}

/* The next chunk of the current stage, in no particular order between threads. */
static inline int next_chunk(void) {
    return atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed);
}

/* This thread's scratch memory, at least ``floats`` long; its content is undefined. It is a few
 * hundred kilobytes: without them no step can be computed, and there is no caller to tell. */
static float *scratch_for(Worker *me, size_t floats) {
    if (me->scratch_floats < floats) {
        free(me->scratch);
        size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
        me->scratch = aligned_alloc(64, bytes);
        if (!me->scratch) abort();
        me->scratch_floats = floats;
    }
    return me->scratch;
}

static void *worker_main(void *arg) {
    Worker *me = arg;
    unsigned seen = 0;
    for (;;) {
        wait_change(&pool.sequence, seen);
        seen++;
        if (!pool.job) return NULL;
        pool.job(me, pool.arg);
        barrier();
    }
}

/* Run ``job`` on every thread of the team; returns when all are done. */
static void run(Job job, void *arg) {
    pthread_mutex_lock(&pool.mutex);
    pool.job = job;
    pool.arg = arg;
    if (pool.size > 1) change(&pool.sequence);
    job(&pool.workers[0], arg);
    barrier();
    pthread_mutex_unlock(&pool.mutex);
}

/* Make the team ``size`` threads, the caller among them. Returns the size reached. */
int triptych_threads(int size) {
    size = size < 1 ? 1 : size > MAX_THREADS ? MAX_THREADS : size;
    pthread_mutex_lock(&pool.mutex);
    if (size != pool.size) {
        pool.job = NULL;
        change(&pool.sequence);
        for (int i = 1; i < pool.size; i++) pthread_join(pool.threads[i], NULL);
        atomic_store(&pool.sequence, 0);
        pool.size = 1;
        for (int i = 1; i < size; i++) {
            pool.workers[i].index = i;
            if (pthread_create(&pool.threads[i], NULL, worker_main, &pool.workers[i])) break;
            pool.size = i + 1;
        }
    }
    size = pool.size;
    pthread_mutex_unlock(&pool.mutex);
    return size;
}

#endif
