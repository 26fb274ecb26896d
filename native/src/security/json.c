/* Reads JSON in place; see security/json.h. */
#include "security/json.h"

#include <stdint.h>
#include <string.h>

static struct json drop(struct json text, size_t count)
{
    return (struct json){text.at + count, text.count - count};
}

static struct json drop_spaces(struct json text)
{
    while (text.count > 0 && json_is_space(*text.at)) {
        text = drop(text, 1);
    }
    return text;
}

/* Drops one character and the spaces around it. Returns false if another one comes. */
static bool take(struct json *text, char expected)
{
    struct json found = drop_spaces(*text);
    if (found.count == 0 || *found.at != expected) {
        return false;
    }
    *text = drop_spaces(drop(found, 1));
    return true;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/*
 * Reads one character of a string, escaped or not. Returns its code, 1..127, or 128 for any other
 * one; -1 if it is malformed. The closing quote is not a character.
 */
static int take_character(struct json *text)
{
    if (text->count == 0 || (uint8_t)*text->at < ' ') {
        return -1;
    }
    int found = (uint8_t)*text->at;
    *text = drop(*text, 1);
    if (found != '\\') {
        return found < 128 ? found : 128;
    }
    if (text->count == 0) {
        return -1;
    }
    char escape = *text->at;
    *text = drop(*text, 1);
    if (escape != 'u') {
        static const char escapes[] = "\"\\/bfnrt";
        static const char meanings[] = "\"\\/\b\f\n\r\t";
        const char *at = escape != '\0' ? strchr(escapes, escape) : NULL;
        return at != NULL ? meanings[at - escapes] : -1;
    }
    int code = 0;
    for (int i = 0; i < 4; i++) {
        int digit = text->count > 0 ? hex_digit(*text->at) : -1;
        if (digit < 0) {
            return -1;
        }
        code = code * 16 + digit;
        *text = drop(*text, 1);
    }
    return code > 0 && code < 128 ? code : 128;
}

/* Drops a string with its quotes. */
static bool skip_string(struct json *text)
{
    if (text->count == 0 || *text->at != '"') {
        return false;
    }
    *text = drop(*text, 1);
    while (text->count > 0 && *text->at != '"') {
        if (take_character(text) < 0) {
            return false;
        }
    }
    if (text->count == 0) {
        return false;
    }
    *text = drop(*text, 1);
    return true;
}

/* Drops a number, true, false or null. Numbers are not read by anyone, so any of their characters
 * will do. */
static bool skip_word(struct json *text)
{
    size_t count = 0;
    while (count < text->count && text->at[count] != '\0' &&
           strchr("+-.0123456789Eaeflnrstu", text->at[count]) != NULL) {
        count++;
    }
    *text = drop(*text, count);
    return count > 0;
}

static bool skip_value(struct json *text, int depth);

static bool skip_members(struct json *text, bool named, char end, int depth)
{
    *text = drop(*text, 1);
    if (take(text, end)) {
        return true;
    }
    do {
        *text = drop_spaces(*text);
        if (named && (!skip_string(text) || !take(text, ':'))) {
            return false;
        }
        if (!skip_value(text, depth - 1)) {
            return false;
        }
    } while (take(text, ','));
    return take(text, end);
}

/* Drops a value and the spaces before it. */
static bool skip_value(struct json *text, int depth) // NOLINT(misc-no-recursion)
{
    *text = drop_spaces(*text);
    if (text->count == 0 || depth == 0) {
        return false;
    }
    switch (*text->at) {
    case '{':
        return skip_members(text, true, '}', depth);
    case '[':
        return skip_members(text, false, ']', depth);
    case '"':
        return skip_string(text);
    default:
        return skip_word(text);
    }
}

bool json_is_valid(struct json text)
{
    return skip_value(&text, JSON_DEPTH_MAX) && drop_spaces(text).count == 0;
}

/* Returns true if value is a string equal to name. */
static bool equals(struct json value, const char *name)
{
    value = drop(value, 1);
    while (value.count > 0 && *value.at != '"') {
        if (*name == '\0' || take_character(&value) != *name++) {
            return false;
        }
    }
    return *name == '\0';
}

bool json_member(struct json value, const char *name, struct json *out)
{
    struct json text = value;
    if (!take(&text, '{') || take(&text, '}')) {
        return false;
    }
    do {
        struct json key = drop_spaces(text);
        text = key;
        if (!skip_string(&text) || !take(&text, ':')) {
            return false;
        }
        if (equals(key, name)) {
            *out = text;
            return true;
        }
        if (!skip_value(&text, JSON_DEPTH_MAX)) {
            return false;
        }
    } while (take(&text, ','));
    return false;
}

bool json_next(struct json array, struct json *item)
{
    struct json text = item->at != NULL ? *item : array;
    if (item->at == NULL) {
        if (!take(&text, '[') || take(&text, ']')) {
            return false;
        }
    } else if (!skip_value(&text, JSON_DEPTH_MAX) || !take(&text, ',')) {
        return false;
    }
    *item = drop_spaces(text);
    return true;
}

bool json_string(struct json value, char *out, size_t room, size_t *count)
{
    struct json text = drop_spaces(value);
    if (text.count == 0 || *text.at != '"') {
        return false;
    }
    text = drop(text, 1);
    size_t written = 0;
    while (text.count > 0 && *text.at != '"') {
        int found = take_character(&text);
        if (found < ' ' || found > '~' || written == room) {
            return false;
        }
        out[written++] = (char)found;
    }
    *count = written;
    return text.count > 0;
}
