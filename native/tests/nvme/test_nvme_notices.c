/* Events, the Changed Namespace List and the ANA log: kinds, states, lengths, and cut logs. */
#include "check.h"
#include "nvme/protocol/notices.h"
#include "nvme/protocol/pdu.h"

#include <dlfs/dlfs.h>

#define GROUPS 3u

static uint8_t ana[256];

/* Makes an ANA log of three groups in states 1, 2 and 3, which have 0, 1 and 2 namespaces. */
static size_t make_ana(void)
{
    memset(ana, 0, sizeof ana);
    nvme_put16(ana + 8, GROUPS);
    size_t at = NVME_LOG_ANA_HEADER_BYTES;
    for (uint32_t i = 0; i < GROUPS; i++) {
        nvme_put32(ana + at, 10 + i);
        nvme_put32(ana + at + 4, i);
        ana[at + 16] = (uint8_t)(0xF0u | (i + 1)); /* the upper half is reserved */
        at += NVME_LOG_ANA_GROUP_BYTES + (size_t)4 * i;
    }
    return at;
}

static uint32_t state_of(uint32_t group, size_t bytes, int expected)
{
    uint32_t state = DLFS_NVME_ANA_CHANGE;
    const char *reason = NULL;
    CHECK_EQ(nvme_decode_ana(ana, bytes, group, &state, &reason), expected);
    CHECK_EQ(reason != NULL, expected < 0);
    return state;
}

static void test_ana(void)
{
    size_t bytes = make_ana();
    for (uint32_t i = 0; i < GROUPS; i++) {
        CHECK_EQ(state_of(10 + i, bytes, 0), i + 1);
    }
    CHECK_EQ(state_of(99, bytes, 0), DLFS_NVME_ANA_NONE);
    CHECK_EQ(state_of(0, bytes, 0), DLFS_NVME_ANA_NONE);
    /* Cut at any byte, a group is found if its 32 bytes are there. */
    for (size_t cut = 0; cut <= bytes; cut++) {
        CHECK_EQ(state_of(10, cut, 0), cut >= 48 ? 1 : DLFS_NVME_ANA_NONE);
        CHECK_EQ(state_of(11, cut, 0), cut >= 80 ? 2 : DLFS_NVME_ANA_NONE);
        CHECK_EQ(state_of(12, cut, 0), cut >= 116 ? 3 : DLFS_NVME_ANA_NONE);
    }
    /* A list of namespaces that reaches beyond the log ends the search. */
    nvme_put32(ana + NVME_LOG_ANA_HEADER_BYTES + 4, UINT32_MAX);
    CHECK_EQ(state_of(10, bytes, 0), DLFS_NVME_ANA_OPTIMIZED);
    CHECK_EQ(state_of(11, bytes, 0), DLFS_NVME_ANA_NONE);
    for (uint32_t value = 0; value < 16; value++) {
        bool known = (value >= 1 && value <= 4) || value == 15;
        ana[NVME_LOG_ANA_HEADER_BYTES + 16] = (uint8_t)value;
        CHECK_EQ(state_of(10, bytes, known ? 0 : DLFS_E_PROTOCOL), known ? value : 15);
    }
    make_ana();
    nvme_put16(ana + 8, 1); /* groups beyond their number are not looked at */
    CHECK_EQ(state_of(11, bytes, 0), DLFS_NVME_ANA_NONE);
}

static void test_ranks(void)
{
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_NONE), 0);
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_OPTIMIZED), 0);
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_NON_OPTIMIZED), 1);
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_INACCESSIBLE), NVME_RANK_UNUSABLE);
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_PERSISTENT_LOSS), NVME_RANK_UNUSABLE);
    CHECK_EQ(nvme_ana_rank(DLFS_NVME_ANA_CHANGE), NVME_RANK_UNUSABLE);
    CHECK(strcmp(nvme_ana_word(DLFS_NVME_ANA_CHANGE), "change") == 0);
    CHECK(strcmp(nvme_ana_word((uint32_t)7), "not reported") == 0);
}

static void test_events(void)
{
    CHECK_EQ(nvme_event_kind(0x040002), NVME_EVENT_NAMESPACE);
    CHECK_EQ(nvme_event_kind(0x0C0302), NVME_EVENT_ANA);
    CHECK_EQ(nvme_event_kind(0x70F002), NVME_EVENT_DISCOVERY);
    CHECK_EQ(nvme_event_kind(0x030102), NVME_EVENT_FIRMWARE);
    CHECK_EQ(nvme_event_kind(0x020101), NVME_EVENT_HEALTH);
    CHECK_EQ(nvme_event_kind(0x010000), NVME_EVENT_OTHER);
    CHECK_EQ(nvme_event_kind(0x000202), NVME_EVENT_OTHER);
    CHECK_EQ(nvme_event_kind(UINT32_MAX), NVME_EVENT_OTHER);
    for (uint32_t event = 0; event < 0x10000; event++) {
        CHECK(nvme_event_phrase(event)[0] != '\0');
    }
    CHECK_EQ(nvme_notices_choose(0, false), 0);
    CHECK_EQ(nvme_notices_choose(UINT32_MAX, true), NVME_NOTICE_DISCOVERY);
    CHECK_EQ(nvme_notices_choose(NVME_NOTICE_NAMESPACE, true), 0);
    CHECK_EQ(nvme_notices_choose(NVME_NOTICE_NAMESPACE, false), 0x11F);
    CHECK_EQ(nvme_notices_choose(UINT32_MAX, false), 0xB1F);
}

static void test_namespaces(void)
{
    uint8_t list[16] = {0};
    CHECK(!nvme_namespace_changed(list, sizeof list, 1));
    nvme_put32(list, 3);
    nvme_put32(list + 4, 7);
    CHECK(nvme_namespace_changed(list, sizeof list, 3));
    CHECK(nvme_namespace_changed(list, sizeof list, 7));
    CHECK(!nvme_namespace_changed(list, sizeof list, 5));
    CHECK(!nvme_namespace_changed(list, 7, 7)); /* the entry is cut */
    CHECK(!nvme_namespace_changed(list, 0, 3));
    nvme_put32(list + 12, 9); /* behind the end of the list */
    CHECK(!nvme_namespace_changed(list, sizeof list, 9));
    nvme_put32(list, UINT32_MAX);
    CHECK(nvme_namespace_changed(list, sizeof list, 5));
}

int main(void)
{
    test_ana();
    test_ranks();
    test_events();
    test_namespaces();
    return 0;
}
