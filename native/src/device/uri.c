/*
 * Parses device URIs: see uri.h.
 *
 * Text is taken apart as slices of the URI, which are never copied but to decode %-escapes. A slice
 * has a length, so that a NUL that an escape stands for is a byte like any other, and is refused.
 *
 * Source: NVM Express Base Specification 2.0, section 4.5 (NQNs) and 3.2.1 (namespace IDs);
 * RFC 1123 section 2.1 (host names); RFC 8089 (file URIs); RFC 6874 (the zone of an IPv6 address).
 */
#include "device/uri.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define SCHEME_BYTES_MAX 32u /* more than any that is known */
#define PORT_DEFAULT 4420u
#define NSID_MAX 0xfffffffeu
#define DURATION_MS_MAX 3600000u
#define BUSY_POLL_US_MAX 1000000u
#define TIMEOUT_MS_DEFAULT 5000u
#define CONNECT_MS_DEFAULT 3000u
#define KEEPALIVE_MS_DEFAULT 10000u
#define RECONNECT_MS_DEFAULT 15000u
#define LABEL_BYTES_MAX 63u
#define ZONE_BYTES_MAX 15u
#define IPV6_BYTES_MAX 45u /* eight groups, or six and an IPv4 address */
#define DIGITS_MAX 10u
#define UUID_BYTES 36u
#define VALUE_BYTES_MAX 320u /* more than any option's value that is valid */
#define EXPECTED_BYTES 256u
#define SHOWN_BYTES 208u

struct slice {
    const char *at;
    size_t bytes;
};

/* A URI on its way into `out`, and where its error goes. */
struct parser {
    struct slice whole;
    struct uri *out;
    char *message;
    uint32_t message_bytes;
};

/* ---- text ------------------------------------------------------------------------------------ */

static struct slice slice_of(const char *text)
{
    return (struct slice){text, strlen(text)};
}

static struct slice drop(struct slice slice, size_t bytes)
{
    return (struct slice){slice.at + bytes, slice.bytes - bytes};
}

/* Cuts a slice at the first separator; *rest gets what follows it. False, and empty: none. */
static bool cut(struct slice slice, char separator, struct slice *first, struct slice *rest)
{
    const char *found = slice.bytes ? memchr(slice.at, separator, slice.bytes) : NULL;
    size_t before = found != NULL ? (size_t)(found - slice.at) : slice.bytes;
    *first = (struct slice){slice.at, before};
    *rest = drop(slice, before + (found != NULL ? 1 : 0));
    return found != NULL;
}

static bool equals(struct slice slice, const char *text)
{
    return slice.bytes == strlen(text) && memcmp(slice.at, text, slice.bytes) == 0;
}

static bool starts_with(struct slice slice, const char *text)
{
    size_t bytes = strlen(text);
    return slice.bytes >= bytes && memcmp(slice.at, text, bytes) == 0;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static int hex_value(char c)
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

static int reject(const struct parser *parser, const char *expected, struct slice got)
{
    char uri[SHOWN_BYTES];
    char found[SHOWN_BYTES];
    if (parser->message != NULL && parser->message_bytes > 0) {
        (void)snprintf(parser->message, parser->message_bytes,
                       "parse device URI '%s': expected %s, got '%s'",
                       uri_show(parser->whole.at, parser->whole.bytes, uri, sizeof uri), expected,
                       uri_show(got.at, got.bytes, found, sizeof found));
    }
    return -EINVAL;
}

/* Decodes %-escapes. What does not fit `room` is left away: a longer text is none that is valid. */
static int unescape(const struct parser *parser, struct slice text, char *to, size_t room,
                    struct slice *out)
{
    size_t length = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        int byte = (unsigned char)text.at[i];
        if (byte == '%') {
            int high = text.bytes - i > 2 ? hex_value(text.at[i + 1]) : -1;
            int low = text.bytes - i > 2 ? hex_value(text.at[i + 2]) : -1;
            if (high < 0 || low < 0) {
                return reject(parser, "two hexadecimal digits after each %", text);
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

/* ---- files ----------------------------------------------------------------------------------- */

static int take_path(const struct parser *parser, struct slice path)
{
    struct uri *out = parser->out;
    if (path.bytes == 0) {
        return reject(parser, "a path", path);
    }
    if (memchr(path.at, '\0', path.bytes) != NULL) {
        return reject(parser, "a path without NUL", path);
    }
    if (path.bytes > URI_PATH_BYTES_MAX) {
        return reject(parser, "a path of at most 4095 bytes", path);
    }
    out->kind = URI_FILE;
    memcpy(out->path, path.at, path.bytes);
    out->path[path.bytes] = '\0';
    return 0;
}

static int parse_file(const struct parser *parser, struct slice rest)
{
    char decoded[URI_PATH_BYTES_MAX + 1];
    struct slice path = rest;
    if (starts_with(rest, "//")) {
        struct slice host;
        struct slice after;
        bool slash = cut(drop(rest, 2), '/', &host, &after);
        if (!slash || (host.bytes > 0 && !equals(host, "localhost"))) {
            return reject(parser, "file:PATH or file:///PATH", rest);
        }
        path = drop(rest, 2 + host.bytes);
    }
    int code = unescape(parser, path, decoded, sizeof decoded, &path);
    return code < 0 ? code : take_path(parser, path);
}

/* ---- NVMe over TCP --------------------------------------------------------------------------- */

static bool read_number(struct slice text, uint32_t low, uint32_t high, uint32_t *out)
{
    uint64_t value = 0;
    if (text.bytes < 1 || text.bytes > DIGITS_MAX) {
        return false;
    }
    for (size_t i = 0; i < text.bytes; i++) {
        if (!is_digit(text.at[i])) {
            return false;
        }
        value = value * 10 + (uint64_t)(text.at[i] - '0');
    }
    if (value < low || value > high) {
        return false;
    }
    *out = (uint32_t)value;
    return true;
}

static bool is_host_name(struct slice name)
{
    size_t label = 0; /* bytes of the one under way */
    if (name.bytes < 1 || name.bytes > URI_HOST_BYTES_MAX) {
        return false;
    }
    for (size_t i = 0; i <= name.bytes; i++) {
        char c = i < name.bytes ? name.at[i] : '.';
        if (c == '.') {
            if (label < 1 || label > LABEL_BYTES_MAX || name.at[i - 1] == '-') {
                return false;
            }
            label = 0;
        } else if (is_letter(c) || is_digit(c) || (c == '-' && label > 0)) {
            label++;
        } else {
            return false;
        }
    }
    return true;
}

static bool is_ipv6(struct slice address)
{
    char text[IPV6_BYTES_MAX + 1];
    struct in6_addr parsed;
    if (address.bytes > IPV6_BYTES_MAX ||
        (address.bytes && memchr(address.at, 0, address.bytes) != NULL)) {
        return false;
    }
    memcpy(text, address.at, address.bytes);
    text[address.bytes] = '\0';
    return inet_pton(AF_INET6, text, &parsed) == 1;
}

static bool is_zone(struct slice zone)
{
    if (zone.bytes < 1 || zone.bytes > ZONE_BYTES_MAX) {
        return false;
    }
    for (size_t i = 0; i < zone.bytes; i++) {
        if (!is_letter(zone.at[i]) && !is_digit(zone.at[i]) &&
            (zone.at[i] == '\0' || strchr("._~-", zone.at[i]) == NULL)) {
            return false;
        }
    }
    return true;
}

/* Takes the host of "[address%zone]:port"; *port gets ":port", or nothing. */
static int cut_ipv6(const struct parser *parser, struct slice text, struct slice *host,
                    struct slice *port)
{
    struct slice address;
    struct slice zone;
    bool closed = cut(drop(text, 1), ']', host, port);
    if (!closed || (port->bytes && port->at[0] != ':')) {
        return reject(parser, "[IPv6 address]:port", text);
    }
    bool zoned = cut(*host, '%', &address, &zone);
    if (!is_ipv6(address)) {
        return reject(parser, "an IPv6 address in brackets", *host);
    }
    if (zoned && !is_zone(zone)) {
        return reject(parser, "an interface's name of at most 15 characters behind %", *host);
    }
    return 0;
}

/* Takes one path to the subsystem: host, host:port, [v6] or [v6]:port. */
static int take_authority(const struct parser *parser, struct slice text)
{
    dlfs_nvme_config *nvme = &parser->out->nvme;
    uint32_t number = nvme->path_count;
    uint32_t port = PORT_DEFAULT;
    struct slice host;
    struct slice tail;
    if (text.bytes && text.at[0] == '[') {
        int code = cut_ipv6(parser, text, &host, &tail);
        if (code < 0) {
            return code;
        }
    } else {
        (void)cut(text, ':', &host, &tail);
        tail = drop(text, host.bytes);
        if (!is_host_name(host)) {
            return reject(parser, "a host name or address (IPv6 in brackets)", host);
        }
    }
    if (tail.bytes && !read_number(drop(tail, 1), 1, UINT16_MAX, &port)) {
        return reject(parser, "a port 1..65535", drop(tail, 1));
    }
    memcpy(parser->out->hosts[number], host.at, host.bytes);
    parser->out->hosts[number][host.bytes] = '\0';
    nvme->hosts[number] = parser->out->hosts[number];
    nvme->ports[number] = port;
    nvme->path_count = number + 1;
    return 0;
}

bool uri_is_nqn(const char *text, size_t bytes)
{
    static const char form[] = "nqn.dddd-dd."; /* d: a digit */
    const size_t prefix = sizeof form - 1;
    if (bytes <= prefix || bytes > DLFS_NVME_NQN_BYTES_MAX) {
        return false;
    }
    for (size_t i = 0; i < prefix; i++) {
        if (form[i] == 'd' ? !is_digit(text[i]) : text[i] != form[i]) {
            return false;
        }
    }
    for (size_t i = prefix; i < bytes; i++) {
        if (text[i] < '!' || text[i] > '~') {
            return false;
        }
    }
    return true;
}

static int take_nqn(const struct parser *parser, struct slice text, char *to)
{
    if (!uri_is_nqn(text.at, text.bytes)) {
        return reject(parser, "an NQN (nqn.yyyy-mm...), at most 223 bytes", text);
    }
    memcpy(to, text.at, text.bytes);
    to[text.bytes] = '\0';
    return 0;
}

bool uri_read_uuid(const char *text, size_t bytes, uint8_t out[16])
{
    uint8_t value[16] = {0};
    size_t digit = 0;
    if (bytes != UUID_BYTES) {
        return false;
    }
    for (size_t i = 0; i < UUID_BYTES; i++) {
        if (i == 8 || i == 13 || i == 18 || i == 23) {
            if (text[i] != '-') {
                return false;
            }
            continue;
        }
        int nibble = hex_value(text[i]);
        if (nibble < 0) {
            return false;
        }
        value[digit / 2] = (uint8_t)(value[digit / 2] << 4 | nibble);
        digit++;
    }
    memcpy(out, value, sizeof value);
    return true;
}

/* The options with numbers: ranges, and what they set. */
static const struct number_option {
    const char *key;
    size_t field; /* offset in dlfs_nvme_config */
    uint32_t low;
    uint32_t high;
} number_options[] = {
    {"nsid", offsetof(dlfs_nvme_config, nsid), 1, NSID_MAX},
    {"timeout_ms", offsetof(dlfs_nvme_config, timeout_ms), 1, DURATION_MS_MAX},
    {"connect_ms", offsetof(dlfs_nvme_config, connect_ms), 1, DURATION_MS_MAX},
    {"keepalive_ms", offsetof(dlfs_nvme_config, keepalive_ms), 0, DURATION_MS_MAX},
    {"reconnect_ms", offsetof(dlfs_nvme_config, reconnect_ms), 0, DURATION_MS_MAX},
    {"busy_poll_us", offsetof(dlfs_nvme_config, busy_poll_us), 0, BUSY_POLL_US_MAX},
};
#define NUMBER_OPTIONS (sizeof number_options / sizeof *number_options)
/* Bits of the options that were seen, behind those of the numbers. */
enum { SEEN_HOSTNQN = 1 << 16, SEEN_HOSTID = 1 << 17, SEEN_HDGST = 1 << 18, SEEN_DDGST = 1 << 19 };

static int take_flag(const struct parser *parser, const char *key, struct slice value,
                     uint32_t digest)
{
    char expected[EXPECTED_BYTES];
    if (!equals(value, "0") && !equals(value, "1")) {
        (void)snprintf(expected, sizeof expected, "%s=0 or %s=1", key, key);
        return reject(parser, expected, value);
    }
    if (value.at[0] == '1') {
        parser->out->nvme.digests |= digest;
    }
    return 0;
}

static int take_number(const struct parser *parser, const struct number_option *option,
                       struct slice value)
{
    char expected[EXPECTED_BYTES];
    uint32_t number;
    if (!read_number(value, option->low, option->high, &number)) {
        (void)snprintf(expected, sizeof expected, "%s %u..%u", option->key, option->low,
                       option->high);
        return reject(parser, expected, value);
    }
    memcpy((char *)&parser->out->nvme + option->field, &number, sizeof number);
    return 0;
}

static int take_host_id(const struct parser *parser, struct slice value)
{
    if (!uri_read_uuid(value.at, value.bytes, parser->out->nvme.host_id)) {
        return reject(parser, "a UUID such as 6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a", value);
    }
    parser->out->has_host_id = 1;
    return 0;
}

/* The bit of an option's name; 0: there is no such option. */
static uint32_t option_bit(struct slice key)
{
    for (uint32_t i = 0; i < NUMBER_OPTIONS; i++) {
        if (equals(key, number_options[i].key)) {
            return 1u << i;
        }
    }
    if (equals(key, "hostnqn")) {
        return SEEN_HOSTNQN;
    }
    if (equals(key, "hostid")) {
        return SEEN_HOSTID;
    }
    if (equals(key, "hdgst")) {
        return SEEN_HDGST;
    }
    return equals(key, "ddgst") ? SEEN_DDGST : 0;
}

static int take_option(const struct parser *parser, uint32_t bit, struct slice value)
{
    switch (bit) {
    case SEEN_HOSTNQN:
        parser->out->nvme.host_nqn = parser->out->host_nqn;
        return take_nqn(parser, value, parser->out->host_nqn);
    case SEEN_HOSTID:
        return take_host_id(parser, value);
    case SEEN_HDGST:
        return take_flag(parser, "hdgst", value, DLFS_NVME_HEADER_DIGEST);
    case SEEN_DDGST:
        return take_flag(parser, "ddgst", value, DLFS_NVME_DATA_DIGEST);
    default:
        return take_number(parser, &number_options[__builtin_ctz(bit)], value);
    }
}

/* Takes one key=value; *seen has the bits of those that came before. */
static int parse_pair(const struct parser *parser, struct slice pair, uint32_t *seen)
{
    char decoded[VALUE_BYTES_MAX];
    struct slice key;
    struct slice value;
    bool has_value = cut(pair, '=', &key, &value);
    bool is_path = has_value && equals(key, "path");
    uint32_t bit = option_bit(key);
    if (!is_path && (!has_value || bit == 0 || (*seen & bit))) {
        return reject(parser,
                      "options nsid, hostnqn, hostid, hdgst, ddgst, timeout_ms, connect_ms, "
                      "keepalive_ms, reconnect_ms, busy_poll_us, path, each once, as key=value",
                      pair);
    }
    *seen |= bit;
    if (is_path && parser->out->nvme.path_count == DLFS_NVME_PATHS_MAX) {
        return reject(parser, "at most 3 further paths", pair);
    }
    int code = unescape(parser, value, decoded, sizeof decoded, &value);
    if (code < 0) {
        return code;
    }
    return is_path ? take_authority(parser, value) : take_option(parser, bit, value);
}

static int parse_query(const struct parser *parser, struct slice query)
{
    uint32_t seen = 0;
    struct slice rest = query;
    bool more = query.bytes > 0;
    while (more) {
        struct slice pair;
        more = cut(rest, '&', &pair, &rest);
        int code = parse_pair(parser, pair, &seen);
        if (code < 0) {
            return code;
        }
    }
    return parser->out->nvme.nsid ? 0 : reject(parser, "?nsid=N, the namespace", query);
}

static int parse_nvme_tcp(const struct parser *parser, struct slice rest)
{
    char decoded[VALUE_BYTES_MAX];
    struct uri *out = parser->out;
    struct slice location;
    struct slice query;
    struct slice authority;
    struct slice path;
    if (!starts_with(rest, "//")) {
        return reject(parser, "// after the scheme", rest);
    }
    (void)cut(drop(rest, 2), '?', &location, &query);
    (void)cut(location, '/', &authority, &path);
    out->kind = URI_NVME_TCP;
    out->nvme.timeout_ms = TIMEOUT_MS_DEFAULT;
    out->nvme.connect_ms = CONNECT_MS_DEFAULT;
    out->nvme.keepalive_ms = KEEPALIVE_MS_DEFAULT;
    out->nvme.reconnect_ms = RECONNECT_MS_DEFAULT;
    out->nvme.subsystem_nqn = out->subsystem_nqn;
    int code = take_authority(parser, authority);
    if (code == 0) {
        code = unescape(parser, path, decoded, sizeof decoded, &path);
    }
    if (code == 0) {
        code = take_nqn(parser, path, out->subsystem_nqn);
    }
    return code < 0 ? code : parse_query(parser, query);
}

/* ---- the whole ------------------------------------------------------------------------------- */

/* Length of the scheme in front of a colon, without it; 0: the text has none. */
static size_t scheme_bytes(struct slice text)
{
    size_t bytes = 0;
    if (text.bytes == 0 || !is_letter(text.at[0])) {
        return 0;
    }
    while (bytes < text.bytes && (is_letter(text.at[bytes]) || is_digit(text.at[bytes]) ||
                                  (text.at[bytes] && strchr("+.-", text.at[bytes]) != NULL))) {
        bytes++;
    }
    return bytes < text.bytes && text.at[bytes] == ':' ? bytes : 0;
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

static int refuse_scheme(const struct parser *parser, const char *scheme, struct slice given)
{
    char expected[EXPECTED_BYTES + 64];
    char got[SCHEME_BYTES_MAX + 64];
    char shown[SHOWN_BYTES];
    for (size_t i = 0; i < 3; i++) {
        static const char *const of_python[] = {"mem", "nvme-tcp+discover", "spdk"};
        if (strcmp(scheme, of_python[i]) != 0) {
            continue;
        }
        if (parser->message != NULL && parser->message_bytes > 0) {
            (void)snprintf(parser->message, parser->message_bytes,
                           "open %s: libdlfs opens paths, file: and nvme-tcp:; %s: needs the "
                           "Python package dlfs",
                           uri_show(parser->whole.at, parser->whole.bytes, shown, sizeof shown),
                           scheme);
        }
        return -ENOTSUP;
    }
    if (strcmp(scheme, "unix") == 0) {
        if (parser->message != NULL && parser->message_bytes > 0) {
            (void)snprintf(parser->message, parser->message_bytes,
                           "open '%s': a service is read-only and no device; name its volume's "
                           "devices",
                           uri_show(parser->whole.at, parser->whole.bytes, shown, sizeof shown));
        }
        return -EINVAL;
    }
    (void)snprintf(expected, sizeof expected,
                   "a path or one of file:, mem:, nvme-tcp:, nvme-tcp+discover:, spdk: (a file of "
                   "that name is ./%.50s)",
                   is_printable(parser->whole) ? parser->whole.at : "NAME");
    (void)snprintf(got, sizeof got, "%.*s:", (int)given.bytes, given.at);
    return reject(parser, expected, slice_of(got));
}

static int parse_whole(const struct parser *parser)
{
    char scheme[SCHEME_BYTES_MAX + 1] = "";
    struct slice text = parser->whole;
    if (text.bytes == 0) {
        return reject(parser, "a path or a URI", text);
    }
    size_t bytes = scheme_bytes(text);
    if (bytes == 0) {
        return take_path(parser, text);
    }
    for (size_t i = 0; i < bytes && i < SCHEME_BYTES_MAX; i++) {
        scheme[i] =
            text.at[i] >= 'A' && text.at[i] <= 'Z' ? (char)(text.at[i] + 'a' - 'A') : text.at[i];
    }
    struct slice rest = drop(text, bytes + 1);
    if (strcmp(scheme, "file") == 0) {
        return parse_file(parser, rest);
    }
    if (strcmp(scheme, "nvme-tcp") != 0) {
        return refuse_scheme(parser, scheme, (struct slice){text.at, bytes});
    }
    if (!is_printable(rest)) {
        return reject(parser, "printable ASCII", rest);
    }
    return parse_nvme_tcp(parser, rest);
}

int uri_parse(const char *text, struct uri *out, char *message, uint32_t message_bytes)
{
    const char *given = text != NULL ? text : "";
    struct parser parser = {.whole = {given, strnlen(given, URI_BYTES_MAX + 1)},
                            .out = out,
                            .message = message,
                            .message_bytes = message_bytes};
    memset(out, 0, sizeof *out);
    if (parser.whole.bytes > URI_BYTES_MAX) {
        return reject(&parser, "at most 8192 bytes", parser.whole);
    }
    return parse_whole(&parser);
}
