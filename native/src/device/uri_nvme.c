/*
 * Parses the URIs of NVMe/TCP namespaces: nvme-tcp://HOST[:PORT]/NQN?nsid=N&KEY=VALUE...
 *
 * Source: NVM Express Base Specification 2.0, section 4.5 (NQNs) and 3.2.1 (namespace IDs);
 * RFC 1123 section 2.1 (host names); RFC 6874 (the zone of an IPv6 address).
 */
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>

#include "device/uri_text.h"

#define PORT_DEFAULT 4420u
#define NSID_MAX 0xfffffffeu
#define DURATION_MS_MAX 3600000u
#define BUSY_POLL_US_MAX 1000000u
#define REAUTH_S_MAX 604800u
#define TIMEOUT_MS_DEFAULT 5000u
#define CONNECT_MS_DEFAULT 3000u
#define KEEPALIVE_MS_DEFAULT 10000u
#define RECONNECT_MS_DEFAULT 15000u
#define LABEL_BYTES_MAX 63u
#define ZONE_BYTES_MAX 15u
#define IPV6_BYTES_MAX 45u /* eight groups, or six and an IPv4 address */
#define DIGITS_MAX 10u
#define UUID_BYTES 36u
#define VALUE_BYTES_MAX 320u /* longer than any valid value of an option */

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
    size_t label = 0; /* bytes of the current label */
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
        } else if (is_alpha(c) || is_digit(c) || (c == '-' && label > 0)) {
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

/*
 * Cuts "[address%25zone]:port", or "[address%zone]:port" as commands take it. *zone is empty
 * without one; *port gets ":port", or nothing.
 */
static int cut_ipv6(const struct uri_parser *parser, struct slice text, struct slice *address,
                    struct slice *zone, struct slice *port)
{
    struct slice host;
    bool closed = slice_cut(slice_drop(text, 1), ']', &host, port);
    if (!closed || (port->bytes && port->at[0] != ':')) {
        return uri_reject(parser, "[IPv6 address]:port", text);
    }
    bool zoned = slice_cut(host, '%', address, zone);
    if (zone->bytes >= 2 && memcmp(zone->at, "25", 2) == 0) {
        *zone = slice_drop(*zone, 2);
    }
    if (!is_ipv6(*address)) {
        return uri_reject(parser, "an IPv6 address in brackets", host);
    }
    if (zoned &&
        (zone->bytes < 1 || zone->bytes > ZONE_BYTES_MAX || !slice_consists_of(*zone, "._~-"))) {
        return uri_reject(parser, "an interface's name of at most 15 characters behind %25", host);
    }
    return 0;
}

/* Parses one path to the subsystem: host, host:port, [v6] or [v6]:port. */
static int take_authority(const struct uri_parser *parser, struct slice text)
{
    dlfs_nvme_config *nvme = &parser->out->nvme;
    uint32_t number = nvme->path_count;
    uint32_t port = PORT_DEFAULT;
    struct slice host = {NULL, 0};
    struct slice zone = {NULL, 0};
    struct slice tail;
    if (text.bytes && text.at[0] == '[') {
        int code = cut_ipv6(parser, text, &host, &zone, &tail);
        if (code < 0) {
            return code;
        }
    } else {
        (void)slice_cut(text, ':', &host, &tail);
        tail = slice_drop(text, host.bytes);
        if (!is_host_name(host)) {
            return uri_reject(parser, "a host name or address (IPv6 in brackets)", host);
        }
    }
    if (tail.bytes && !read_number(slice_drop(tail, 1), 1, UINT16_MAX, &port)) {
        return uri_reject(parser, "a port 1..65535", slice_drop(tail, 1));
    }
    (void)snprintf(parser->out->hosts[number], sizeof parser->out->hosts[number], "%.*s%s%.*s",
                   (int)host.bytes, host.at, zone.bytes ? "%" : "", (int)zone.bytes,
                   zone.bytes ? zone.at : "");
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

static int take_nqn(const struct uri_parser *parser, struct slice text, char *to)
{
    if (!uri_is_nqn(text.at, text.bytes)) {
        return uri_reject(parser, "an NQN (nqn.yyyy-mm...), at most 223 bytes", text);
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

#define FIELD(name) offsetof(dlfs_nvme_config, name)

/* The options. */
static const struct option {
    const char *key;
    size_t field; /* offset in dlfs_nvme_config of what the option sets */
    enum { FORM_NUMBER, FORM_FLAG, FORM_NQN, FORM_UUID, FORM_KEY } form;
    uint32_t value; /* of a flag: the bit that it sets; of a key: its index in uri->keys */
    uint32_t low;   /* least and largest number */
    uint32_t high;
} options[] = {
    {"nsid", FIELD(nsid), FORM_NUMBER, .low = 1, .high = NSID_MAX},
    {"hostnqn", FIELD(host_nqn), .form = FORM_NQN},
    {"hostid", FIELD(host_id), .form = FORM_UUID},
    {"hdgst", FIELD(digests), FORM_FLAG, .value = DLFS_NVME_HEADER_DIGEST},
    {"ddgst", FIELD(digests), FORM_FLAG, .value = DLFS_NVME_DATA_DIGEST},
    {"timeout_ms", FIELD(timeout_ms), FORM_NUMBER, .low = 1, .high = DURATION_MS_MAX},
    {"connect_ms", FIELD(connect_ms), FORM_NUMBER, .low = 1, .high = DURATION_MS_MAX},
    {"keepalive_ms", FIELD(keepalive_ms), FORM_NUMBER, .high = DURATION_MS_MAX},
    {"reconnect_ms", FIELD(reconnect_ms), FORM_NUMBER, .high = DURATION_MS_MAX},
    {"busy_poll_us", FIELD(busy_poll_us), FORM_NUMBER, .high = BUSY_POLL_US_MAX},
    {"dhchap_key", FIELD(dhchap_key), FORM_KEY, .value = URI_KEY_DHCHAP},
    {"dhchap_ctrl_key", FIELD(dhchap_ctrl_key), FORM_KEY, .value = URI_KEY_CTRL},
    {"tls_psk", FIELD(tls_psk), FORM_KEY, .value = URI_KEY_TLS},
    {"reauth_s", FIELD(reauth_s), FORM_NUMBER, .high = REAUTH_S_MAX},
    {"concat", FIELD(concat), FORM_FLAG, .value = 1},
};
#define OPTIONS (sizeof options / sizeof *options)

static int take_flag(const struct uri_parser *parser, const struct option *option,
                     struct slice value)
{
    char expected[URI_EXPECTED_BYTES];
    uint32_t *flags = (uint32_t *)(void *)((char *)&parser->out->nvme + option->field);
    if (!slice_equals(value, "0") && !slice_equals(value, "1")) {
        (void)snprintf(expected, sizeof expected, "%s=0 or %s=1", option->key, option->key);
        return uri_reject(parser, expected, value);
    }
    *flags |= value.at[0] == '1' ? option->value : 0;
    return 0;
}

static int take_number(const struct uri_parser *parser, const struct option *option,
                       struct slice value)
{
    char expected[URI_EXPECTED_BYTES];
    uint32_t *number = (uint32_t *)(void *)((char *)&parser->out->nvme + option->field);
    if (!read_number(value, option->low, option->high, number)) {
        (void)snprintf(expected, sizeof expected, "%s %u..%u", option->key, option->low,
                       option->high);
        return uri_reject(parser, expected, value);
    }
    return 0;
}

static int take_key(const struct uri_parser *parser, const struct option *option,
                    struct slice value)
{
    char *name = parser->out->keys[option->value];
    if (value.bytes < 1 || value.bytes > URI_KEY_NAME_BYTES_MAX || value.at[0] == '.' ||
        !slice_consists_of(value, "._-")) {
        /* The options are not shown: the value may be a key. */
        struct uri_parser shown = *parser;
        struct slice others;
        (void)slice_cut(parser->whole, '?', &shown.whole, &others);
        return uri_reject(&shown, "the name of a key, 1 to 64 of A-Z a-z 0-9 . _ -",
                          slice_of("something else"));
    }
    memcpy(name, value.at, value.bytes);
    name[value.bytes] = '\0';
    memcpy((char *)&parser->out->nvme + option->field, (const void *)&name, sizeof name);
    return 0;
}

static int take_option(const struct uri_parser *parser, const struct option *option,
                       struct slice value)
{
    struct uri *out = parser->out;
    switch (option->form) {
    case FORM_FLAG:
        return take_flag(parser, option, value);
    case FORM_NQN:
        out->nvme.host_nqn = out->host_nqn;
        return take_nqn(parser, value, out->host_nqn);
    case FORM_UUID:
        if (!uri_read_uuid(value.at, value.bytes, out->nvme.host_id)) {
            return uri_reject(parser, "a UUID such as 6e8b5a3c-0c2f-4f0a-9d0e-2f6f6d1f4b7a", value);
        }
        out->has_host_id = 1;
        return 0;
    case FORM_KEY:
        return take_key(parser, option, value);
    default:
        return take_number(parser, option, value);
    }
}

/* Parses one key=value. *seen has the bits of the options before it. */
static int parse_pair(const struct uri_parser *parser, struct slice pair, uint32_t *seen)
{
    char decoded[VALUE_BYTES_MAX];
    struct slice key;
    struct slice value;
    uint32_t number = 0;
    bool has_value = slice_cut(pair, '=', &key, &value);
    bool is_path = has_value && slice_equals(key, "path");
    while (number < OPTIONS && !slice_equals(key, options[number].key)) {
        number++;
    }
    uint32_t bit = 1u << number;
    if (!is_path && (!has_value || number == OPTIONS || (*seen & bit))) {
        return uri_reject(
            parser,
            "options nsid, hostnqn, hostid, hdgst, ddgst, timeout_ms, connect_ms, "
            "keepalive_ms, reconnect_ms, busy_poll_us, dhchap_key, "
            "dhchap_ctrl_key, tls_psk, reauth_s, concat, path, each once, as key=value",
            pair);
    }
    *seen |= is_path ? 0 : bit;
    if (is_path && parser->out->nvme.path_count == DLFS_NVME_PATHS_MAX) {
        return uri_reject(parser, "at most 3 further paths", pair);
    }
    int code = uri_unescape(parser, value, decoded, sizeof decoded, &value);
    if (code < 0) {
        return code;
    }
    return is_path ? take_authority(parser, value) : take_option(parser, &options[number], value);
}

static int parse_query(const struct uri_parser *parser, struct slice query)
{
    uint32_t seen = 0;
    struct slice remainder = query;
    bool more = query.bytes > 0;
    while (more) {
        struct slice pair;
        more = slice_cut(remainder, '&', &pair, &remainder);
        int code = parse_pair(parser, pair, &seen);
        if (code < 0) {
            return code;
        }
    }
    const dlfs_nvme_config *nvme = &parser->out->nvme;
    if (nvme->nsid == 0) {
        return uri_reject(parser, "?nsid=N, the namespace", query);
    }
    if (nvme->dhchap_key == NULL && nvme->dhchap_ctrl_key != NULL) {
        return uri_reject(parser, "dhchap_key with dhchap_ctrl_key", query);
    }
    if (nvme->concat != 0 && (nvme->dhchap_key == NULL || nvme->tls_psk != NULL)) {
        return uri_reject(parser, "dhchap_key and no tls_psk with concat=1", query);
    }
    return 0;
}

int uri_parse_nvme_tcp(const struct uri_parser *parser, struct slice text)
{
    char decoded[VALUE_BYTES_MAX];
    struct uri *out = parser->out;
    struct slice location;
    struct slice query;
    struct slice authority;
    struct slice path;
    if (!slice_starts_with(text, "//")) {
        return uri_reject(parser, "// after the scheme", text);
    }
    (void)slice_cut(slice_drop(text, 2), '?', &location, &query);
    (void)slice_cut(location, '/', &authority, &path);
    out->kind = URI_NVME_TCP;
    out->nvme.timeout_ms = TIMEOUT_MS_DEFAULT;
    out->nvme.connect_ms = CONNECT_MS_DEFAULT;
    out->nvme.keepalive_ms = KEEPALIVE_MS_DEFAULT;
    out->nvme.reconnect_ms = RECONNECT_MS_DEFAULT;
    out->nvme.subsystem_nqn = out->subsystem_nqn;
    int code = take_authority(parser, authority);
    if (code == 0) {
        code = uri_unescape(parser, path, decoded, sizeof decoded, &path);
    }
    if (code == 0) {
        code = take_nqn(parser, path, out->subsystem_nqn);
    }
    return code < 0 ? code : parse_query(parser, query);
}
