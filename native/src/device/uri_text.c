/*
 * Text of device URIs: slices, escapes, and messages about what was expected and found.
 *
 * Source: RFC 3986, section 2.1 (percent-encoding).
 */
#include "device/uri_text.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

bool slice_cut(struct slice slice, char separator, struct slice *first, struct slice *after)
{
    const char *found = slice.bytes ? memchr(slice.at, separator, slice.bytes) : NULL;
    size_t before = found != NULL ? (size_t)(found - slice.at) : slice.bytes;
    *first = (struct slice){slice.at, before};
    *after = slice_drop(slice, before + (found != NULL ? 1 : 0));
    return found != NULL;
}

bool slice_consists_of(struct slice slice, const char *others)
{
    for (size_t i = 0; i < slice.bytes; i++) {
        char c = slice.at[i];
        if (!is_alpha(c) && !is_digit(c) && (c == '\0' || strchr(others, c) == NULL)) {
            return false;
        }
    }
    return true;
}

int hex_value(char c)
{
    if (is_digit(c)) {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

const char *uri_show(const char *text, size_t bytes, char *shown, size_t shown_bytes)
{
    size_t length = 0;
    for (size_t i = 0; i < bytes; i++) {
        char escape[5] = {text[i], '\0'};
        if (text[i] < ' ' ||
            text[i] > '~') { /* where char is signed, bytes above 127 are negative */
            (void)snprintf(escape, sizeof escape, "\\x%02x", (unsigned char)text[i]);
        }
        size_t more = strlen(escape);
        if (length + more + sizeof "..." > shown_bytes) {
            memcpy(shown + length, "...", 3);
            length += 3;
            break;
        }
        memcpy(shown + length, escape, more);
        length += more;
    }
    shown[length] = '\0';
    return shown;
}

/*
 * Cuts a URL of another kind, given by mistake, before its user and password, and before the query
 * of an http: URL, which may be a signature.
 */
static struct slice without_secrets(struct slice text)
{
    const char *found = text.bytes ? memmem(text.at, text.bytes, "://", 3) : NULL;
    if (found == NULL) {
        return text;
    }
    size_t host = (size_t)(found - text.at) + 3;
    size_t end = host;
    size_t user = host;
    while (end < text.bytes && strchr("/?#", text.at[end]) == NULL) {
        user = text.at[end++] == '@' ? end : user;
    }
    bool is_http = text.bytes > 4 && strncasecmp(text.at, "http", 4) == 0;
    const char *query = is_http ? memchr(text.at, '?', text.bytes) : NULL;
    if (user > host) {
        text.bytes = host;
    } else if (query != NULL) {
        text.bytes = (size_t)(query - text.at);
    }
    return text;
}

struct slice uri_without_key(struct slice text)
{
    static const char *const prefixes[] = {"DHHC-1", "NVMeTLSkey-1"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        const char *found =
            text.bytes ? memmem(text.at, text.bytes, prefixes[i], strlen(prefixes[i])) : NULL;
        text.bytes = found != NULL ? (size_t)(found - text.at) : text.bytes;
    }
    return without_secrets(text);
}

int uri_reject(const struct uri_parser *parser, const char *expected, struct slice got)
{
    char uri[URI_SHOWN_BYTES];
    char found[URI_SHOWN_BYTES];
    struct slice whole = uri_without_key(parser->whole);
    if (whole.bytes < parser->whole.bytes) {
        got = slice_of("something else");
    }
    (void)snprintf(parser->message, parser->message_bytes,
                   "parse device URI '%s': expected %s, got '%s'",
                   uri_show(whole.at, whole.bytes, uri, sizeof uri), expected,
                   uri_show(got.at, got.bytes, found, sizeof found));
    return -EINVAL;
}

int uri_unescape(const struct uri_parser *parser, struct slice text, char *to, size_t room,
                 struct slice *out)
{
    size_t length = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        int byte = (unsigned char)text.at[i];
        if (byte == '%') {
            int high = text.bytes - i > 2 ? hex_value(text.at[i + 1]) : -1;
            int low = text.bytes - i > 2 ? hex_value(text.at[i + 2]) : -1;
            if (high < 0 || low < 0) {
                return uri_reject(parser, "two hexadecimal digits after each %", text);
            }
            byte = high * 16 + low;
            i += 2;
        }
        if (length < room) {
            to[length++] = (char)byte;
        }
    }
    *out = (struct slice){to, length};
    return 0;
}
