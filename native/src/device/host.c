/*
 * Finds the host's name and ID.
 *
 * Source: NVM Express Base Specification 2.0, section 4.5 (the UUID form of NQNs); machine-id(5),
 * which recommends hashing the ID with an application's own key; RFC 7693 (BLAKE2s); RFC 4122
 * (UUIDs).
 */
#include "device/host.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "device/uri.h"

#define NQN_PREFIX "nqn.2014-08.org.nvmexpress:uuid:"
#define LINE_BYTES 512u /* longer than any valid line */
#define PATH_BYTES 4096u
#define MACHINE_DIGITS 32u
#define BLAKE2S_ROUNDS 10u

/* ---- BLAKE2s, of the 16 bytes of a machine's ID ---------------------------------------------- */

static uint32_t rotate(uint32_t value, uint32_t bits)
{
    return value >> bits | value << (32 - bits);
}

static void mix(uint32_t *v, const uint8_t *place, uint32_t x, uint32_t y)
{
    uint32_t *a = &v[place[0]], *b = &v[place[1]], *c = &v[place[2]], *d = &v[place[3]];
    *a += *b + x;
    *d = rotate(*d ^ *a, 16);
    *c += *d;
    *b = rotate(*b ^ *c, 12);
    *a += *b + y;
    *d = rotate(*d ^ *a, 8);
    *c += *d;
    *b = rotate(*b ^ *c, 7);
}

static const uint32_t blake2s_start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* Compresses the last block of a message into the state. `bytes` is the length of the message. */
static void blake2s_compress(uint32_t state[8], const uint32_t words[16], uint32_t bytes)
{
    static const uint8_t sigma[BLAKE2S_ROUNDS][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
        {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
        {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
        {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
        {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    };
    static const uint8_t places[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14},
                                         {3, 7, 11, 15}, {0, 5, 10, 15}, {1, 6, 11, 12},
                                         {2, 7, 8, 13},  {3, 4, 9, 14}};
    uint32_t v[16];
    memcpy(v, state, 8 * sizeof *v);
    memcpy(v + 8, blake2s_start, sizeof blake2s_start);
    v[12] ^= bytes;
    v[14] = ~v[14]; /* marks the last block */
    for (size_t round = 0; round < BLAKE2S_ROUNDS; round++) {
        for (size_t i = 0; i < 8; i++) {
            mix(v, places[i], words[sigma[round][2 * i]], words[sigma[round][2 * i + 1]]);
        }
    }
    for (uint32_t i = 0; i < 8; i++) {
        state[i] ^= v[i] ^ v[i + 8];
    }
}

/* Computes BLAKE2s with 16 bytes of digest and the personalization "dlfshost". */
static void blake2s(const uint8_t data[16], uint8_t digest[16])
{
    uint32_t state[8];
    uint32_t person[2];
    uint32_t words[16] = {0};
    memcpy(state, blake2s_start, sizeof state);
    memcpy(person, "dlfshost", sizeof person);
    memcpy(words, data, 16);
    state[0] ^= UINT32_C(0x01010010); /* depth 1, fan-out 1, no key, 16 bytes of digest */
    state[6] ^= person[0];
    state[7] ^= person[1];
    blake2s_compress(state, words, 16);
    memcpy(digest, state, 16);
}

/* ---- the host -------------------------------------------------------------------------------- */

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Reads the first line of a file, without spaces around it; empty if there is none. */
static const char *read_line(const char *folder, const char *name, char line[LINE_BYTES])
{
    char path[PATH_BYTES];
    int length = snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = length < (int)sizeof path ? fopen(path, "re") : NULL;
    line[0] = '\0';
    if (file == NULL) {
        return line;
    }
    if (fgets(line, LINE_BYTES, file) == NULL) {
        line[0] = '\0';
    }
    (void)fclose(file);
    size_t end = strlen(line);
    while (end > 0 && is_space(line[end - 1])) {
        end--;
    }
    line[end] = '\0';
    while (is_space(*line)) {
        line++;
    }
    return line;
}

static bool read_machine(const char *folder, uint8_t out[16])
{
    char line[LINE_BYTES];
    char uuid[MACHINE_DIGITS + 5];
    const char *found = read_line(folder, "machine-id", line);
    if (strlen(found) != MACHINE_DIGITS || strspn(found, "0123456789abcdef") != MACHINE_DIGITS) {
        return false;
    }
    (void)snprintf(uuid, sizeof uuid, "%.8s-%.4s-%.4s-%.4s-%.12s", found, found + 8, found + 12,
                   found + 16, found + 20);
    return uri_read_uuid(uuid, strlen(uuid), out);
}

/* Derives a version-4 UUID. Returns false on a machine without an ID. */
static bool derive_id(const char *folder, uint8_t out[16])
{
    uint8_t machine[16];
    if (!read_machine(folder, machine)) {
        return false;
    }
    blake2s(machine, out);
    out[6] = (uint8_t)((out[6] & 0x0f) | 0x40);
    out[8] = (uint8_t)((out[8] & 0x3f) | 0x80);
    return true;
}

static void write_nqn(const uint8_t id[16], char nqn[DLFS_NVME_NQN_BYTES_MAX + 1])
{
    (void)snprintf(nqn, DLFS_NVME_NQN_BYTES_MAX + 1,
                   NQN_PREFIX
                   "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                   id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7], id[8], id[9], id[10],
                   id[11], id[12], id[13], id[14], id[15]);
}

/* Reads the UUID of an NQN in its UUID form. */
static bool read_uuid_in(const char *nqn, uint8_t out[16])
{
    const size_t prefix = sizeof NQN_PREFIX - 1;
    return strncmp(nqn, NQN_PREFIX, prefix) == 0 &&
           uri_read_uuid(nqn + prefix, strlen(nqn + prefix), out);
}

static int fail(char *message, uint32_t message_bytes, const char *reason)
{
    if (message != NULL && message_bytes > 0) {
        (void)snprintf(message, message_bytes, "find this host's NQN and ID: %s", reason);
    }
    return -EINVAL;
}

int host_identity_read(const char *folder, const char *nqn, const uint8_t *id,
                       struct host_identity *out, char *message, uint32_t message_bytes)
{
    char nqn_line[LINE_BYTES];
    char id_line[LINE_BYTES];
    uint8_t stated[16] = {0};
    uint8_t derived[16] = {0};
    uint8_t named[16];
    const char *stated_nqn = read_line(folder, "nvme/hostnqn", nqn_line);
    const char *stated_id = read_line(folder, "nvme/hostid", id_line);
    bool has_stated = uri_read_uuid(stated_id, strlen(stated_id), stated);
    bool has_derived = derive_id(folder, derived);
    bool is_own = nqn == NULL || strcmp(nqn, stated_nqn) == 0;
    if (nqn == NULL && stated_nqn[0] != '\0' && !uri_is_nqn(stated_nqn, strlen(stated_nqn))) {
        return fail(message, message_bytes, "expected an NQN in /etc/nvme/hostnqn");
    }
    const char *name = nqn != NULL ? nqn : stated_nqn;
    bool needs_id = id == NULL || name[0] == '\0';
    if (needs_id && stated_id[0] != '\0' && !has_stated) {
        return fail(message, message_bytes, "expected a UUID in /etc/nvme/hostid");
    }
    bool has_named = read_uuid_in(name, named);
    bool has_id = id != NULL || has_stated || has_named || has_derived;
    if (!has_id || (name[0] == '\0' && !has_stated && !has_derived)) {
        return fail(message, message_bytes,
                    "expected them in /etc/nvme/hostnqn and /etc/nvme/hostid, or the ID of the "
                    "machine in /etc/machine-id, got none; write the NQN that the targets allow "
                    "and its UUID, or give hostnqn= and hostid= in the URI");
    }
    if (name[0] != '\0') {
        memcpy(out->nqn, name, strlen(name) + 1);
    } else {
        write_nqn(has_stated ? stated : derived, out->nqn);
    }
    const uint8_t *chosen = has_stated && (is_own || !has_named) ? stated : named;
    if (id != NULL) {
        chosen = id;
    } else if (!has_stated && !has_named) {
        chosen = derived;
    }
    memcpy(out->id, chosen, sizeof out->id);
    return 0;
}
