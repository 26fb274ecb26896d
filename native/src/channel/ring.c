/*
 * Rings of fixed-size entries with one producer and one consumer, in two processes, and waiting for
 * the other side.
 *
 * Positions count entries since the start and wrap at 32 bits. The producer writes the entry, then
 * the tail. The consumer reads the tail (acquire), copies the entry, then advances the head. Each
 * side keeps its own position in private memory and checks the other side's: positions that differ
 * by more than `count` are invalid and end the channel.
 *
 * Sleeping. A consumer that finds no entry sets `asleep`, reads the tail again, and sleeps only if
 * there is still no entry. A producer sets the tail, reads `asleep`, and wakes the consumer if it
 * is set. All four accesses are sequentially consistent. So they have one order, and the side that
 * writes later reads the other side's write: no wake-up is lost. Fences would do the same, but
 * ThreadSanitizer does not follow fences. On x86-64 the cost is one exchange instruction per entry.
 * The producer clears `asleep`, so a consumer is woken once for many entries.
 *
 * Wake-up bytes are sent and received with MSG_DONTWAIT, so neither side can block the other. If
 * the socket's buffer is full of unread bytes, those bytes wake the other side as well.
 */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "channel/channel.h"
#include "platform/clock.h"
#include "platform/thread.h"

#define SPIN_NS UINT64_C(50000) /* about the cost of one sleep and wake-up to both sides */
#define WAKE_NS UINT64_C(30000) /* time that a wake-up may add to a wait that slept */
#define SPIN_ROUNDS 16          /* checks of the ring between two readings of the clock */
#define SCORE_FIRST 2u
#define SCORE_MAX 8u

struct ring ring_over(struct ring_positions *positions, uint8_t *entries, uint32_t entry_bytes,
                      uint32_t count)
{
    return (struct ring){
        .positions = positions, .entries = entries, .entry_bytes = entry_bytes, .count = count};
}

static uint8_t *entry_of(const struct ring *ring, uint32_t position)
{
    return ring->entries + (size_t)(position & (ring->count - 1)) * ring->entry_bytes;
}

bool ring_put(struct ring *ring, const void *entry)
{
    uint32_t head = atomic_load_explicit(&ring->positions->head, memory_order_acquire);
    if (ring->position - head >= ring->count) {
        return false;
    }
    memcpy(entry_of(ring, ring->position), entry, ring->entry_bytes);
    ring->position++;
    atomic_store_explicit(&ring->positions->tail, ring->position, memory_order_seq_cst);
    return true;
}

int ring_take(struct ring *ring, void *entry)
{
    uint32_t tail = atomic_load_explicit(&ring->positions->tail, memory_order_acquire);
    if (tail == ring->position) {
        return 0;
    }
    if (tail - ring->position > ring->count) {
        return -1;
    }
    memcpy(entry, entry_of(ring, ring->position), ring->entry_bytes);
    /* The barrier keeps the compiler from reading the original again, which may change. */
    __asm__ volatile("" ::: "memory");
    ring->position++;
    atomic_store_explicit(&ring->positions->head, ring->position, memory_order_release);
    return 1;
}

static bool ring_ready(const struct ring *ring)
{
    return atomic_load_explicit(&ring->positions->tail, memory_order_seq_cst) != ring->position;
}

/* ---- waiting --------------------------------------------------------------------------------- */

void waiter_init(struct waiter *waiter, const struct ring *other, int socket, int stop)
{
    cpu_set_t processors;
    bool several =
        sched_getaffinity(0, sizeof(processors), &processors) == 0 && CPU_COUNT(&processors) > 1;
    waiter->other_processor = &other->positions->processor;
    waiter->socket = socket;
    waiter->stop = stop;
    waiter->may_spin = several;
    waiter->score = SCORE_FIRST;
    atomic_init(&waiter->sleeps, 0);
    atomic_init(&waiter->wakes, 0);
}

void ring_wake(struct ring *ring, struct waiter *waiter)
{
    if (!atomic_load_explicit(&ring->positions->asleep, memory_order_seq_cst) ||
        !atomic_exchange_explicit(&ring->positions->asleep, 0, memory_order_seq_cst)) {
        return;
    }
    static const uint8_t byte = 1;
    /* send fails if the peer has closed the socket; the next ring_wait detects that. */
    (void)send(waiter->socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    atomic_fetch_add_explicit(&waiter->wakes, 1, memory_order_relaxed);
}

/* Publishes this side's processor. Returns true if the other side last ran on another one. */
static bool runs_elsewhere(struct ring *ring, const struct waiter *waiter)
{
    uint32_t here = (uint32_t)sched_getcpu();
    _Atomic uint32_t *own = &ring->positions->processor;
    if (atomic_load_explicit(own, memory_order_relaxed) != here) {
        atomic_store_explicit(own, here, memory_order_relaxed);
    }
    return atomic_load_explicit(waiter->other_processor, memory_order_relaxed) != here;
}

static bool spin(struct ring *ring, const struct waiter *waiter, uint64_t until_ns)
{
    while (runs_elsewhere(ring, waiter)) {
        for (int i = 0; i < SPIN_ROUNDS; i++) {
            if (ring_ready(ring)) {
                return true;
            }
            processor_pause();
        }
        if (monotonic_ns() >= until_ns) {
            return false;
        }
    }
    return false;
}

/* Receives wake-up bytes. Returns false if the other side hung up. */
static bool drain(int socket)
{
    uint8_t bytes[256];
    ssize_t got = recv(socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

/* Sleeps once. WAIT_READY: the caller should check the ring. */
static enum wait_end sleep_once(struct waiter *waiter, int timeout_ms)
{
    struct pollfd files[] = {
        {.fd = waiter->socket, .events = POLLIN | POLLRDHUP},
        {.fd = waiter->stop, .events = POLLIN}, /* poll ignores a negative descriptor */
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
        atomic_store_explicit(&ring->positions->asleep, 1, memory_order_seq_cst);
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
    atomic_store_explicit(&ring->positions->asleep, 0, memory_order_relaxed);
    /* Entries that were put before the other side hung up are still taken. */
    return end != WAIT_STOPPED && ring_ready(ring) ? WAIT_READY : end;
}

enum wait_end ring_wait(struct ring *ring, struct waiter *waiter, int timeout_ms)
{
    if (ring_ready(ring)) {
        return WAIT_READY;
    }
    uint64_t start = monotonic_ns();
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : start + (uint64_t)timeout_ms * UINT64_C(1000000);
    bool could_spin = waiter->may_spin && runs_elsewhere(ring, waiter);
    bool spins = could_spin && waiter->score > 0;
    if (spins && spin(ring, waiter, start + SPIN_NS)) {
        waiter->score += waiter->score < SCORE_MAX;
        return WAIT_READY;
    }
    enum wait_end end = sleep_until(ring, waiter, until);
    bool soon = end == WAIT_READY && monotonic_ns() - start <= SPIN_NS + WAKE_NS;
    if (could_spin && !spins && soon && runs_elsewhere(ring, waiter)) {
        waiter->score++;
    } else if (spins && waiter->score > 0) {
        waiter->score--;
    }
    return end;
}
