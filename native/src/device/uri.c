/*
 * Parses device URIs: the scheme, and the paths of files. uri_nvme.c parses nvme-tcp: URIs, and
 * uri_text.c has what both need of text.
 *
 * Source: RFC 8089 (file URIs).
 */
#include "device/uri_text.h"

#include <errno.h>
#include <stdio.h>

#define SCHEME_BYTES_MAX 32u /* longer than any known scheme */

/* ---- files ----------------------------------------------------------------------------------- */

static int take_path(const struct uri_parser *parser, struct slice path)
{
    struct uri *out = parser->out;
    if (path.bytes == 0) {
        return uri_reject(parser, "a path", path);
    }
    if (memchr(path.at, '\0', path.bytes) != NULL) {
        return uri_reject(parser, "a path without NUL", path);
    }
    if (path.bytes > URI_PATH_BYTES_MAX) {
        return uri_reject(parser, "a path of at most 4095 bytes", path);
    }
    out->kind = URI_FILE;
    memcpy(out->path, path.at, path.bytes);
    out->path[path.bytes] = '\0';
    return 0;
}

static int parse_file(const struct uri_parser *parser, struct slice text)
{
    char decoded[URI_PATH_BYTES_MAX + 1];
    struct slice path = text;
    if (slice_starts_with(text, "//")) {
        struct slice host;
        struct slice after_slash;
        bool slash = slice_cut(slice_drop(text, 2), '/', &host, &after_slash);
        if (!slash || (host.bytes > 0 && !slice_equals(host, "localhost"))) {
            return uri_reject(parser, "file:PATH or file:///PATH", text);
        }
        path = slice_drop(text, 2 + host.bytes);
    }
    int code = uri_unescape(parser, path, decoded, sizeof decoded, &path);
    return code < 0 ? code : take_path(parser, path);
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Returns the length of the scheme before the first colon; 0 if the text has none. */
static size_t scheme_bytes(struct slice text)
{
    struct slice scheme;
    struct slice after;
    bool found = slice_cut(text, ':', &scheme, &after) && scheme.bytes > 0;
    return found && is_alpha(text.at[0]) && slice_consists_of(scheme, "+.-") ? scheme.bytes : 0;
}

static bool is_printable(struct slice text)
{
    for (size_t i = 0; i < text.bytes; i++) {
        if (text.at[i] < ' ' || text.at[i] > '~') {
            return false;
        }
    }
    return true;
}

static int refuse_scheme(const struct uri_parser *parser, const char *scheme, struct slice given)
{
    char expected[URI_EXPECTED_BYTES + 64];
    char got[SCHEME_BYTES_MAX + 64];
    char shown[URI_SHOWN_BYTES];
    struct slice whole = uri_without_key(parser->whole);
    for (size_t i = 0; i < 3; i++) {
        static const char *const of_python[] = {"mem", "nvme-tcp+discover", "spdk"};
        if (strcmp(scheme, of_python[i]) != 0) {
            continue;
        }
        (void)snprintf(parser->message, parser->message_bytes,
                       "open %s: libdlfs opens paths, file: and nvme-tcp:; %s: needs the Python "
                       "package dlfs",
                       uri_show(whole.at, whole.bytes, shown, sizeof shown), scheme);
        return -ENOTSUP;
    }
    if (strcmp(scheme, "unix") == 0) {
        (void)snprintf(parser->message, parser->message_bytes,
                       "open '%s': a service is read-only and no device; name its volume's devices",
                       uri_show(whole.at, whole.bytes, shown, sizeof shown));
        return -EINVAL;
    }
    bool is_shown = whole.bytes == parser->whole.bytes && is_printable(whole);
    (void)snprintf(expected, sizeof expected,
                   "a path or one of file:, mem:, nvme-tcp:, nvme-tcp+discover:, spdk: (a file of "
                   "that name is ./%.50s)",
                   is_shown ? parser->whole.at : "NAME");
    (void)snprintf(got, sizeof got, "%.*s:", (int)given.bytes, given.at);
    return uri_reject(parser, expected, slice_of(got));
}

static int parse_whole(const struct uri_parser *parser)
{
    char scheme[SCHEME_BYTES_MAX + 1] = "";
    struct slice text = parser->whole;
    if (text.bytes == 0) {
        return uri_reject(parser, "a path or a URI", text);
    }
    size_t bytes = scheme_bytes(text);
    if (bytes == 0) {
        return take_path(parser, text);
    }
    for (size_t i = 0; i < bytes && i < SCHEME_BYTES_MAX; i++) {
        scheme[i] =
            text.at[i] >= 'A' && text.at[i] <= 'Z' ? (char)(text.at[i] + 'a' - 'A') : text.at[i];
    }
    struct slice after = slice_drop(text, bytes + 1);
    if (strcmp(scheme, "file") == 0) {
        return parse_file(parser, after);
    }
    if (strcmp(scheme, "nvme-tcp") != 0) {
        return refuse_scheme(parser, scheme, (struct slice){text.at, bytes});
    }
    if (!is_printable(after)) {
        return uri_reject(parser, "printable ASCII", after);
    }
    return uri_parse_nvme_tcp(parser, after);
}

int uri_parse(const char *text, struct uri *out, char *message, uint32_t message_bytes)
{
    const char *given = text != NULL ? text : "";
    struct uri_parser parser = {.whole = {given, strnlen(given, URI_BYTES_MAX + 1)},
                                .out = out,
                                .message = message,
                                .message_bytes = message != NULL ? message_bytes : 0};
    memset(out, 0, sizeof *out);
    if (parser.whole.bytes > URI_BYTES_MAX) {
        return uri_reject(&parser, "at most 8192 bytes", parser.whole);
    }
    return parse_whole(&parser);
}
