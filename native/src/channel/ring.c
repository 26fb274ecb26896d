/*
 * Rings of fixed entries with one producer and one consumer, in two processes, and how a side waits
 * for the other.
 *
 * Places count entries for ever and wrap with 32 bits. The producer writes the entry, then the
 * tail; the consumer reads the tail (acquire), copies the entry, then moves the head. Each side
 * keeps its own place in memory of its own, and checks the other's: more than `count` apart makes
 * no sense, and is the other side's end.
 *
 * Sleeping. A consumer that finds nothing sets `asleep`, then looks at the tail once more, and
 * sleeps only if there is still nothing. A producer sets the tail, then looks at `asleep`, and
 * wakes the consumer if it is set. All four are sequentially consistent, so they have one order in
 * which not both "nothing" and "awake" can be read: whichever was written later, its writer reads
 * the other's. That is what a fence between the two would do; it is done by the accesses themselves
 * because ThreadSanitizer follows those. On x86-64 that is one exchange instruction for an entry.
 * The producer takes `asleep` back, so that a consumer is woken once for many entries.
 *
 * The sockets are sent to and received from with MSG_DONTWAIT: neither side can make the other
 * block, and one full of bytes that nobody has received yet wakes as well as another byte would.
 */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "channel/channel.h"
#include "platform/clock.h"

#define SPIN_NS UINT64_C(50000) /* about what one sleep and its wake-up cost both sides */
#define WAKE_NS UINT64_C(30000) /* what a wake-up may add to a wait that slept */
#define SPIN_ROUNDS 16          /* looks at the ring between looks at the clock */
#define SCORE_FIRST 2u
#define SCORE_MAX 8u

struct ring ring_over(struct ring_places *places, uint8_t *entries, uint32_t entry_bytes,
                      uint32_t count)
{
    return (struct ring){
        .places = places, .entries = entries, .entry_bytes = entry_bytes, .count = count};
}

static uint8_t *entry_of(const struct ring *ring, uint32_t place)
{
    return ring->entries + (size_t)(place & (ring->count - 1)) * ring->entry_bytes;
}

bool ring_put(struct ring *ring, const void *entry)
{
    uint32_t head = atomic_load_explicit(&ring->places->head, memory_order_acquire);
    if (ring->own - head >= ring->count) {
        return false;
    }
    memcpy(entry_of(ring, ring->own), entry, ring->entry_bytes);
    ring->own++;
    atomic_store_explicit(&ring->places->tail, ring->own, memory_order_seq_cst);
    return true;
}

int ring_take(struct ring *ring, void *entry)
{
    uint32_t tail = atomic_load_explicit(&ring->places->tail, memory_order_acquire);
    if (tail == ring->own) {
        return 0;
    }
    if (tail - ring->own > ring->count) {
        return -1;
    }
    memcpy(entry, entry_of(ring, ring->own), ring->entry_bytes);
    /* The copy is what is checked and used from here on, whatever becomes of the original. */
    __asm__ volatile("" ::: "memory");
    ring->own++;
    atomic_store_explicit(&ring->places->head, ring->own, memory_order_release);
    return 1;
}

static bool ring_ready(const struct ring *ring)
{
    return atomic_load_explicit(&ring->places->tail, memory_order_seq_cst) != ring->own;
}

/* ---- waiting --------------------------------------------------------------------------------- */

void waiter_init(struct waiter *waiter, const struct ring *other, int socket, int stop)
{
    cpu_set_t processors;
    bool several =
        sched_getaffinity(0, sizeof(processors), &processors) == 0 && CPU_COUNT(&processors) > 1;
    waiter->other_processor = &other->places->processor;
    waiter->socket = socket;
    waiter->stop = stop;
    waiter->may_spin = several;
    waiter->score = SCORE_FIRST;
    atomic_init(&waiter->sleeps, 0);
    atomic_init(&waiter->wakes, 0);
}

void ring_wake(struct ring *ring, struct waiter *waiter)
{
    if (!atomic_load_explicit(&ring->places->asleep, memory_order_seq_cst) ||
        !atomic_exchange_explicit(&ring->places->asleep, 0, memory_order_seq_cst)) {
        return;
    }
    static const uint8_t byte = 1;
    /* What fails here has been noticed, or is noticed by whoever waits next. */
    (void)send(waiter->socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    atomic_fetch_add_explicit(&waiter->wakes, 1, memory_order_relaxed);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Says where this side runs; whether the other one ran elsewhere when it last said so. */
static bool apart(struct ring *ring, const struct waiter *waiter)
{
    uint32_t here = (uint32_t)sched_getcpu();
    _Atomic uint32_t *own = &ring->places->processor;
    if (atomic_load_explicit(own, memory_order_relaxed) != here) {
        atomic_store_explicit(own, here, memory_order_relaxed);
    }
    return atomic_load_explicit(waiter->other_processor, memory_order_relaxed) != here;
}

static bool spin(struct ring *ring, const struct waiter *waiter, uint64_t until_ns)
{
    while (apart(ring, waiter)) {
        for (int i = 0; i < SPIN_ROUNDS; i++) {
            if (ring_ready(ring)) {
                return true;
            }
            relax();
        }
        if (monotonic_ns() >= until_ns) {
            return false;
        }
    }
    return false;
}

/* Receives bytes that woke this side; false when the other side is gone. */
static bool drain(int socket)
{
    uint8_t bytes[256];
    ssize_t got = recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

/* Sleeps until something happens; WAIT_READY means that it is time to look at the ring. */
static enum wait_end sleep_once(struct waiter *waiter, int timeout_ms)
{
    struct pollfd files[] = {
        {.fd = waiter->socket, .events = POLLIN | POLLRDHUP},
        {.fd = waiter->stop, .events = POLLIN}, /* none, when it is negative */
    };
    int code = poll(files, 2, timeout_ms);
    if (code < 0 && errno != EINTR) {
        return WAIT_GONE;
    }
    if (code == 0) {
        return WAIT_TIME;
    }
    if (code > 0 && files[1].revents != 0) {
        return WAIT_STOPPED;
    }
    if (code > 0 && files[0].revents != 0 && !drain(waiter->socket)) {
        return WAIT_GONE;
    }
    return code > 0 && (files[0].revents & (POLLHUP | POLLERR | POLLRDHUP)) ? WAIT_GONE
                                                                            : WAIT_READY;
}

static enum wait_end sleep_until(struct ring *ring, struct waiter *waiter, uint64_t until_ns)
{
    enum wait_end end = WAIT_READY;
    atomic_fetch_add_explicit(&waiter->sleeps, 1, memory_order_relaxed);
    while (end == WAIT_READY) {
        atomic_store_explicit(&ring->places->asleep, 1, memory_order_seq_cst);
        if (ring_ready(ring)) {
            break;
        }
        uint64_t now = until_ns == UINT64_MAX ? 0 : monotonic_ns();
        if (now >= until_ns) {
            end = WAIT_TIME;
        } else {
            end = sleep_once(
                waiter, until_ns == UINT64_MAX ? -1 : (int)((until_ns - now + 999999) / 1000000));
        }
    }
    atomic_store_explicit(&ring->places->asleep, 0, memory_order_relaxed);
    /* What came before the end is still taken. */
    return end != WAIT_STOPPED && ring_ready(ring) ? WAIT_READY : end;
}

enum wait_end ring_wait(struct ring *ring, struct waiter *waiter, int timeout_ms)
{
    if (ring_ready(ring)) {
        return WAIT_READY;
    }
    uint64_t start = monotonic_ns();
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : start + (uint64_t)timeout_ms * UINT64_C(1000000);
    bool could_spin = waiter->may_spin && apart(ring, waiter);
    bool spins = could_spin && waiter->score > 0;
    if (spins && spin(ring, waiter, start + SPIN_NS)) {
        waiter->score += waiter->score < SCORE_MAX;
        return WAIT_READY;
    }
    enum wait_end end = sleep_until(ring, waiter, until);
    bool soon = end == WAIT_READY && monotonic_ns() - start <= SPIN_NS + WAKE_NS;
    if (could_spin && !spins && soon && apart(ring, waiter)) {
        waiter->score++;
    } else if (spins && waiter->score > 0) {
        waiter->score--;
    }
    return end;
}
