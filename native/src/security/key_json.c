/*
 * Finds keys in the configuration file of nvme-cli; see security/key.h.
 *
 * The file is JSON, and read in place: a value is the rest of the text that begins with it, and is
 * examined when it is needed. A library for one small file would be one more to carry in the wheel,
 * and would copy keys into memory that it does not wipe; so would Python, which is not there for
 * programs in C. Nothing is allocated. The text may be hostile: it is checked as a whole first, and
 * values are nested at most DEPTH_MAX deep.
 *
 * Source: RFC 8259.
 */
#include "security/key.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 32
#define NQN_BYTES_MAX 223u
#define NAME_BYTES_MAX 16u /* longer than the name of any member that is looked for */

/* ---- the text -------------------------------------------------------------------------------- */

static const char *skip_spaces(const char *text)
{
    return text + strspn(text, " \t\r\n");
}

/* Drops one character and the spaces around it. Returns false if another one comes. */
static bool take(const char **text, char expected)
{
    const char *found = skip_spaces(*text);
    if (*found != expected) {
        return false;
    }
    *text = skip_spaces(found + 1);
    return true;
}

/*
 * Reads one character of a string, escaped or not. Returns its code, 1..127, or 128 for any other
 * one; -1 if it is malformed. The closing quote is not a character.
 */
static int take_character(const char **text)
{
    static const char escapes[] = "\"\\/bfnrt";
    static const char meanings[] = "\"\\/\b\f\n\r\t";
    const char *at = *text;
    uint8_t found = (uint8_t)*at++;
    if (found < ' ') {
        return -1;
    }
    *text = at;
    if (found != '\\') {
        return found < 128 ? found : 128;
    }
    const char *escape = *at != '\0' ? strchr(escapes, *at) : NULL;
    if (escape != NULL) {
        *text = at + 1;
        return meanings[escape - escapes];
    }
    char digits[5] = "";
    if (*at != 'u' || strspn(at + 1, "0123456789abcdefABCDEF") < 4) {
        return -1;
    }
    *text = at + 5;
    memcpy(digits, at + 1, 4);
    long code = strtol(digits, NULL, 16);
    return code > 0 && code < 128 ? (int)code : 128;
}

/* These functions return the text behind what they drop, or NULL if it is malformed. */
static const char *skip_value(const char *text, int depth);

static const char *skip_string(const char *text)
{
    if (*text++ != '"') {
        return NULL;
    }
    while (*text != '"') {
        if (take_character(&text) < 0) {
            return NULL;
        }
    }
    return text + 1;
}

/* Drops an array; or an object, whose members are named. */
static const char *skip_members(const char *text, bool named, char end, int depth)
{
    text++;
    if (take(&text, end)) {
        return text;
    }
    do {
        text = skip_spaces(text);
        if (named) {
            text = skip_string(text);
            if (text == NULL || !take(&text, ':')) {
                return NULL;
            }
        }
        text = skip_value(text, depth - 1);
        if (text == NULL) {
            return NULL;
        }
    } while (take(&text, ','));
    return take(&text, end) ? text : NULL;
}

/* Drops a value and the spaces before it. */
static const char *skip_value(const char *text, int depth) // NOLINT(misc-no-recursion)
{
    text = skip_spaces(text);
    if (depth == 0) {
        return NULL;
    }
    switch (*text) {
    case '{':
        return skip_members(text, true, '}', depth);
    case '[':
        return skip_members(text, false, ']', depth);
    case '"':
        return skip_string(text);
    default:
        break;
    }
    /* A number, true, false or null: none is read, so any of their characters will do. */
    size_t bytes = strspn(text, "+-.0123456789Eaeflnrstu");
    return bytes > 0 ? text + bytes : NULL;
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Decodes a string of printable ASCII; returns false if value is none, or has no room in `out`. */
static bool read_string(const char *value, char *out, size_t room)
{
    size_t bytes = 0;
    if (*value++ != '"') {
        return false;
    }
    while (*value != '"') {
        int found = take_character(&value);
        if (found < ' ' || found > '~' || bytes + 1 == room) {
            return false;
        }
        out[bytes++] = (char)found;
    }
    out[bytes] = '\0';
    return true;
}

/* Returns a member of an object; NULL if value is no object or has no such member. */
static const char *find_member(const char *value, const char *name)
{
    char found[NAME_BYTES_MAX];
    bool more = take(&value, '{');
    while (more && *value == '"') {
        const char *member = skip_string(value);
        if (member == NULL || !take(&member, ':')) {
            return NULL;
        }
        if (read_string(value, found, sizeof found) && strcmp(found, name) == 0) {
            return member;
        }
        value = skip_value(member, DEPTH_MAX);
        more = value != NULL && take(&value, ',');
    }
    return NULL;
}

/* Returns the first item of an array; NULL if value is none, or no array. */
static const char *first_item(const char *value)
{
    return value != NULL && take(&value, '[') && *value != ']' ? value : NULL;
}

static const char *next_item(const char *item)
{
    item = skip_value(item, DEPTH_MAX);
    return item != NULL && take(&item, ',') ? item : NULL;
}

/* ---- the file -------------------------------------------------------------------------------- */

/* Returns true if a member of an object is that text. */
static bool member_equals(const char *object, const char *name, const char *expected)
{
    char found[NQN_BYTES_MAX + 1];
    const char *value = find_member(object, name);
    return value != NULL && read_string(value, found, sizeof found) && strcmp(found, expected) == 0;
}

static bool take_key(const char *object, const struct security_key_query *query,
                     char text[SECURITY_KEY_TEXT_BYTES_MAX + 1])
{
    static const char *const members[] = {[SECURITY_KEY_HOST] = "dhchap_key",
                                          [SECURITY_KEY_CONTROLLER] = "dhchap_ctrl_key",
                                          [SECURITY_KEY_TLS] = "tls_key"};
    const char *value = find_member(object, members[query->kind]);
    return value != NULL && read_string(value, text, SECURITY_KEY_TEXT_BYTES_MAX + 1);
}

/* Looks for the key in the ports of a subsystem, and then in the subsystem. */
static bool find_in_subsystem(const char *subsystem, const struct security_key_query *query,
                              char text[SECURITY_KEY_TEXT_BYTES_MAX + 1])
{
    for (const char *port = first_item(find_member(subsystem, "ports")); port != NULL;
         port = next_item(port)) {
        if (take_key(port, query, text)) {
            return true;
        }
    }
    return take_key(subsystem, query, text);
}

/* Looks for the key in the entry of a subsystem, and then in that of the host. */
static bool find_in_host(const char *host, const struct security_key_query *query,
                         char text[SECURITY_KEY_TEXT_BYTES_MAX + 1])
{
    for (const char *subsystem = first_item(find_member(host, "subsystems")); subsystem != NULL;
         subsystem = next_item(subsystem)) {
        if (member_equals(subsystem, "nqn", query->subsystem_nqn) &&
            find_in_subsystem(subsystem, query, text)) {
            return true;
        }
    }
    return query->kind == SECURITY_KEY_HOST && take_key(host, query, text);
}

int security_key_find_in_json(const struct security_key_query *query, const char *json,
                              char text[SECURITY_KEY_TEXT_BYTES_MAX + 1])
{
    const char *end = skip_value(json, DEPTH_MAX);
    text[0] = '\0';
    if (end == NULL || *skip_spaces(end) != '\0') {
        return -EBADMSG;
    }
    for (const char *host = first_item(json); host != NULL; host = next_item(host)) {
        if (member_equals(host, "hostnqn", query->host_nqn) && find_in_host(host, query, text)) {
            return 0;
        }
    }
    text[0] = '\0';
    return 0;
}
