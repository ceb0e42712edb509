/* One thread that takes part in works that can be shared, while it has a core to run on.
 *
 * Nobody waits for it to come: whoever ends a work does what is left of it, takes it back if it was not begun,
 * and waits only for the item that the helper has in its hands. Where other processes want the core as well,
 * that can last a time slice, or it comes too late: then it is left out of the next works, of ever more. To wake a thread
 * costs the waker as much as half a megabyte of copying, so after a work the helper looks around by itself for
 * a while; only then it sleeps. */
#ifndef TRIPTYCH_HELPER_H
#define TRIPTYCH_HELPER_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define NAP_NS 200000
#define NAPS 12
#define SPINS 2000
#define LONG_WAIT_NS 200000
#define LATE_NS 500000
#define MAX_LEFT_OUT 63

typedef struct Work Work;
/* Takes items that nobody has taken until none is left. */
typedef void (*Take)(Work *);

typedef struct {
    Take take;
    int64_t posted; /* when; 0: not at all */
    Work *_Atomic after;
} Shared; /* first in every work */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t posted, left;
    int running, asleep;
    int penalty, left_out; /* works that it is left out of: at first, and still */
    Work *_Atomic first, *_Atomic current;
} helper = {.mutex = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER, .left = PTHREAD_COND_INITIALIZER};

#define SHARED(work) ((Shared *)(work))

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t helper_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void *helper_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&helper.mutex);
    for (int naps = 0;; naps = NAPS) {
        pthread_mutex_unlock(&helper.mutex);
        for (; !helper.first && naps; naps--) nanosleep(&(struct timespec){0, NAP_NS}, NULL);
        pthread_mutex_lock(&helper.mutex);
        helper.asleep = 1;
        while (!helper.first) pthread_cond_wait(&helper.posted, &helper.mutex);
        helper.asleep = 0;
        helper.current = helper.first;
        helper.first = SHARED(helper.first)->after;
        pthread_mutex_unlock(&helper.mutex);
        SHARED(helper.current)->take(helper.current);
        pthread_mutex_lock(&helper.mutex);
        helper.current = NULL;
        pthread_cond_broadcast(&helper.left);
    }
    return NULL;
}

/* Returns whether there is a helper from now on; it lasts as long as the process. */
static int helper_start(void) {
    pthread_t thread;
    pthread_mutex_lock(&helper.mutex);
    if (!helper.running && !pthread_create(&thread, NULL, helper_main, NULL)) {
        pthread_detach(thread);
        helper.running = 1;
    }
    pthread_mutex_unlock(&helper.mutex);
    return helper.running;
}

/* Let the helper begin; returns 0 when it will not. The work must stay where it is until its end. */
static int helper_begin(Work *work) {
    pthread_mutex_lock(&helper.mutex);
    const int posted = helper.running && !helper.left_out;
    if (helper.left_out) helper.left_out--;
    if (posted) {
        Work *_Atomic *last = &helper.first;
        while (*last) last = &SHARED(*last)->after;
        SHARED(work)->after = NULL;
        SHARED(work)->posted = helper_now();
        *last = work;
        if (helper.asleep) pthread_cond_signal(&helper.posted);
    }
    pthread_mutex_unlock(&helper.mutex);
    return posted;
}

/* Call with the mutex. */
static void helper_judge(int good) {
    const int longer = 2 * helper.penalty + 1;
    helper.penalty = good ? 0 : longer < MAX_LEFT_OUT ? longer : MAX_LEFT_OUT;
    helper.left_out = helper.penalty;
}

/* Returns when all of it is done, and the helper has nothing more to do with it. */
static void helper_end(Work *work) {
    SHARED(work)->take(work);
    if (!SHARED(work)->posted) return;
    int queued = 0;
    pthread_mutex_lock(&helper.mutex);
    for (Work *_Atomic *at = &helper.first; *at; at = &SHARED(*at)->after)
        if (*at == work) {
            *at = SHARED(work)->after;
            queued = 1;
            break;
        }
    const int64_t began = helper_now();
    if (queued) {
        if (began - SHARED(work)->posted > LATE_NS) helper_judge(0);
    } else {
        pthread_mutex_unlock(&helper.mutex);
        for (int i = 0; i < SPINS && helper.current == work; i++) relax();
        pthread_mutex_lock(&helper.mutex);
        while (helper.current == work) pthread_cond_wait(&helper.left, &helper.mutex);
        helper_judge(helper_now() - began < LONG_WAIT_NS);
    }
    pthread_mutex_unlock(&helper.mutex);
}

#endif
