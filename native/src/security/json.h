/*
 * Reads JSON in place: a value is a part of the text, and is examined when it is needed.
 *
 * It reads one small file of nvme-cli. A library for that would be one more to carry in the wheel,
 * and would copy keys into memory that it does not wipe. Nothing is allocated. Text may be hostile:
 * all lengths are checked, and values are nested at most JSON_DEPTH_MAX deep.
 *
 * Source: RFC 8259.
 */
#ifndef DLFS_SECURITY_JSON_H
#define DLFS_SECURITY_JSON_H

#include <stdbool.h>
#include <stddef.h>

#define JSON_DEPTH_MAX 32

/* Text that begins with a value; what follows the value is ignored. */
struct json {
    const char *at;
    size_t count;
};

static inline bool json_is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* Returns true if text is one JSON value and nothing else. All functions below expect such text. */
bool json_is_valid(struct json text);
/* Finds a member of an object. Returns false if value is no object or has no such member. */
bool json_member(struct json value, const char *name, struct json *out);
/* Calls: `struct json item = {0}; while (json_next(array, &item))`. Returns false at the end, and
 * if array is no array. */
bool json_next(struct json array, struct json *item);
/* Decodes a string of printable ASCII. Returns false if value is none, or has over `room` bytes. */
bool json_string(struct json value, char *out, size_t room, size_t *count);

#endif
