/*
 * Slices of a device URI, and the parser's state: shared by uri.c (scheme, paths, file:) and
 * uri_nvme.c (nvme-tcp:). Internal to the part "device".
 *
 * Slices are never copied, except to decode %-escapes. A slice has a length, so that an escaped NUL
 * is a byte like any other, and is refused.
 */
#ifndef DLFS_URI_TEXT_H
#define DLFS_URI_TEXT_H

#include "device/uri.h"

#include <string.h>

#define URI_EXPECTED_BYTES 256u
#define URI_SHOWN_BYTES 208u

struct slice {
    const char *at;
    size_t bytes;
};

/* The target of a parse and the message of its error. */
struct uri_parser {
    struct slice whole;
    struct uri *out;
    char *message; /* or NULL, with message_bytes 0 */
    uint32_t message_bytes;
};

static inline struct slice slice_of(const char *text)
{
    return (struct slice){text, strlen(text)};
}

static inline struct slice slice_drop(struct slice slice, size_t bytes)
{
    return (struct slice){slice.at + bytes, slice.bytes - bytes};
}

static inline bool slice_equals(struct slice slice, const char *text)
{
    return slice.bytes == strlen(text) && memcmp(slice.at, text, slice.bytes) == 0;
}

static inline bool slice_starts_with(struct slice slice, const char *text)
{
    size_t bytes = strlen(text);
    return slice.bytes >= bytes && memcmp(slice.at, text, bytes) == 0;
}

static inline bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline bool is_alpha(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Returns true if all bytes are letters, digits, or among `others`. */
bool slice_consists_of(struct slice slice, const char *others);

/* Returns the value of a hexadecimal digit, or -1. */
int hex_value(char c);

/*
 * Cuts a slice at the first separator. *after gets the text after it. Returns false, with
 * *after empty, if there is none.
 */
bool slice_cut(struct slice slice, char separator, struct slice *first, struct slice *after);

/*
 * Cuts a text where a key begins, which some other tools expect in their options, or the password
 * or signature of a URL.
 */
struct slice uri_without_key(struct slice text);

/* Writes the message of a malformed URI, without any part of a key; returns -EINVAL. */
int uri_reject(const struct uri_parser *parser, const char *expected, struct slice got);

/* Decodes %-escapes. Text that exceeds `room` is cut; such a long text is never valid. */
int uri_unescape(const struct uri_parser *parser, struct slice text, char *to, size_t room,
                 struct slice *out);

/* Parses an nvme-tcp: URI behind its scheme. */
int uri_parse_nvme_tcp(const struct uri_parser *parser, struct slice text);

#endif
