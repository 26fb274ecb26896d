/*
 * Tests rings between two threads: every entry arrives once and in order, whichever side sleeps,
 * and a side that is awake is never woken.
 */
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "channel/channel.h"
#include "check.h"

#define ENTRIES 64u
#define MESSAGES 60000u

struct side {
    struct ring ring;
    struct waiter waiter;
};

struct pair {
    struct ring_positions positions;
    uint64_t entries[ENTRIES];
    struct side producer;
    struct side consumer;
    int stop;
};

static void pair_open(struct pair *pair)
{
    int sockets[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    *pair = (struct pair){.stop = eventfd(0, EFD_NONBLOCK)};
    uint8_t *entries = (uint8_t *)pair->entries;
    pair->producer.ring = ring_over(&pair->positions, entries, sizeof(uint64_t), ENTRIES);
    pair->consumer.ring = ring_over(&pair->positions, entries, sizeof(uint64_t), ENTRIES);
    waiter_init(&pair->producer.waiter, &pair->consumer.ring, sockets[0], -1);
    waiter_init(&pair->consumer.waiter, &pair->consumer.ring, sockets[1], pair->stop);
}

static void pair_close(struct pair *pair)
{
    close(pair->producer.waiter.socket);
    close(pair->consumer.waiter.socket);
    close(pair->stop);
}

static void put(struct pair *pair, uint64_t value)
{
    CHECK(ring_put(&pair->producer.ring, &value));
}

static void full_and_empty(void)
{
    struct pair pair;
    uint64_t value;
    pair_open(&pair);
    for (uint64_t round = 0; round < 3; round++) {
        CHECK_EQ(ring_take(&pair.consumer.ring, &value), 0);
        for (uint64_t i = 0; i < ENTRIES; i++) {
            put(&pair, round * ENTRIES + i);
        }
        CHECK(!ring_put(&pair.producer.ring, &value));
        for (uint64_t i = 0; i < ENTRIES; i++) {
            CHECK_EQ(ring_take(&pair.consumer.ring, &value), 1);
            CHECK_EQ(value, round * ENTRIES + i);
        }
    }
    pair_close(&pair);
}

/* Invalid positions are refused, and no memory outside the ring is accessed. */
static void nonsense(void)
{
    struct pair pair;
    uint64_t value = 1;
    pair_open(&pair);
    atomic_store(&pair.positions.tail, ENTRIES + 1);
    CHECK_EQ(ring_take(&pair.consumer.ring, &value), -1);
    atomic_store(&pair.positions.tail, UINT32_MAX);
    CHECK_EQ(ring_take(&pair.consumer.ring, &value), -1);
    atomic_store(&pair.positions.head, 1);
    CHECK(!ring_put(&pair.producer.ring, &value));
    atomic_store(&pair.positions.head, UINT32_MAX / 2);
    CHECK(!ring_put(&pair.producer.ring, &value));
    pair_close(&pair);
}

/* An awake consumer needs no system call; a sleeping one needs one for many entries. */
static void wakes_are_counted(void)
{
    struct pair pair;
    uint64_t value;
    char byte;
    pair_open(&pair);
    for (uint64_t i = 0; i < 10; i++) {
        put(&pair, i);
        ring_wake(&pair.producer.ring, &pair.producer.waiter);
    }
    CHECK_EQ(pair.producer.waiter.wakes, 0);
    while (ring_take(&pair.consumer.ring, &value) == 1) {
        continue;
    }
    atomic_store(&pair.positions.asleep, 1);
    for (uint64_t i = 0; i < 10; i++) {
        put(&pair, i);
        ring_wake(&pair.producer.ring, &pair.producer.waiter);
    }
    CHECK_EQ(pair.producer.waiter.wakes, 1);
    CHECK_EQ(recv(pair.consumer.waiter.socket, &byte, 1, MSG_DONTWAIT), 1);
    CHECK_EQ(recv(pair.consumer.waiter.socket, &byte, 1, MSG_DONTWAIT), -1);
    CHECK_EQ(ring_wait(&pair.consumer.ring, &pair.consumer.waiter, -1), WAIT_READY);
    CHECK_EQ(pair.consumer.waiter.sleeps, 0);
    pair_close(&pair);
}

static void ends_of_waits(void)
{
    struct pair pair;
    uint64_t value = 5;
    pair_open(&pair);
    struct side *consumer = &pair.consumer;
    CHECK_EQ(ring_wait(&consumer->ring, &consumer->waiter, 1), WAIT_TIME);
    CHECK_EQ(eventfd_write(pair.stop, 1), 0);
    CHECK_EQ(ring_wait(&consumer->ring, &consumer->waiter, -1), WAIT_STOPPED);
    consumer->waiter.stop = -1;
    put(&pair, value);
    shutdown(pair.producer.waiter.socket, SHUT_RDWR);
    CHECK_EQ(ring_wait(&consumer->ring, &consumer->waiter, -1),
             WAIT_READY); /* the entries put before */
    CHECK_EQ(ring_take(&consumer->ring, &value), 1);
    CHECK_EQ(ring_wait(&consumer->ring, &consumer->waiter, -1), WAIT_GONE);
    pair_close(&pair);
}

/* A socket whose buffer is full of unread bytes blocks no side. */
static void full_socket(void)
{
    struct pair pair;
    char bytes[4096] = {0};
    pair_open(&pair);
    while (send(pair.producer.waiter.socket, bytes, sizeof(bytes), MSG_DONTWAIT) > 0) {
        continue;
    }
    atomic_store(&pair.positions.asleep, 1);
    put(&pair, 1);
    ring_wake(&pair.producer.ring, &pair.producer.waiter);
    CHECK_EQ(pair.producer.waiter.wakes, 1);
    pair_close(&pair);
}

struct exchange {
    struct pair there;
    struct pair back;
};

static uint64_t next_value(struct side *side)
{
    uint64_t value;
    int taken;
    while ((taken = ring_take(&side->ring, &value)) == 0) {
        CHECK_EQ(ring_wait(&side->ring, &side->waiter, -1), WAIT_READY);
    }
    CHECK_EQ(taken, 1);
    return value;
}

static void *answer(void *argument)
{
    struct exchange *exchange = argument;
    for (uint64_t i = 0; i < MESSAGES; i++) {
        CHECK_EQ(next_value(&exchange->there.consumer), i);
        put(&exchange->back, i * 3);
        ring_wake(&exchange->back.producer.ring, &exchange->back.producer.waiter);
    }
    return NULL;
}

/* Two threads exchange requests and answers; they spin and sleep, or only sleep. */
static void ask_and_answer(bool may_spin)
{
    struct exchange exchange;
    pthread_t thread;
    pair_open(&exchange.there);
    pair_open(&exchange.back);
    exchange.there.consumer.waiter.other_processor = &exchange.back.positions.processor;
    exchange.back.consumer.waiter.other_processor = &exchange.there.positions.processor;
    exchange.there.consumer.waiter.may_spin &= may_spin;
    exchange.back.consumer.waiter.may_spin &= may_spin;
    CHECK_EQ(pthread_create(&thread, NULL, answer, &exchange), 0);
    for (uint64_t sent = 0, got = 0; got < MESSAGES; got++) {
        uint64_t ahead = got % 5;
        for (; sent < MESSAGES && sent <= got + ahead; sent++) {
            put(&exchange.there, sent);
        }
        ring_wake(&exchange.there.producer.ring, &exchange.there.producer.waiter);
        CHECK_EQ(next_value(&exchange.back.consumer), got * 3);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    pair_close(&exchange.there);
    pair_close(&exchange.back);
}

int main(void)
{
    full_and_empty();
    nonsense();
    wakes_are_counted();
    ends_of_waits();
    full_socket();
    ask_and_answer(true);
    ask_and_answer(false);
    return 0;
}
