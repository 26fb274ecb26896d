/* Finds keys in the configuration file of nvme-cli; see security/key.h. */
#include "security/key.h"

#include <errno.h>
#include <string.h>

#include "security/json.h"

#define NQN_BYTES_MAX 223u

/* Returns true if a member of an object is that text. */
static bool member_equals(struct json object, const char *name, const char *expected)
{
    char found[NQN_BYTES_MAX];
    size_t count;
    struct json value;
    return json_member(object, name, &value) && json_string(value, found, sizeof found, &count) &&
           count == strlen(expected) && memcmp(found, expected, count) == 0;
}

static bool take_key(struct json object, const struct security_key_query *query,
                     char text[SECURITY_KEY_TEXT_BYTES_MAX], size_t *text_bytes)
{
    static const char *const members[] = {[SECURITY_KEY_HOST] = "dhchap_key",
                                          [SECURITY_KEY_CONTROLLER] = "dhchap_ctrl_key",
                                          [SECURITY_KEY_TLS] = "tls_key"};
    struct json value;
    return json_member(object, members[query->kind], &value) &&
           json_string(value, text, SECURITY_KEY_TEXT_BYTES_MAX, text_bytes);
}

/* Looks for the key in the ports of a subsystem, and then in the subsystem. */
static bool find_in_subsystem(struct json subsystem, const struct security_key_query *query,
                              char text[SECURITY_KEY_TEXT_BYTES_MAX], size_t *text_bytes)
{
    struct json ports;
    struct json port = {0};
    if (json_member(subsystem, "ports", &ports)) {
        while (json_next(ports, &port)) {
            if (take_key(port, query, text, text_bytes)) {
                return true;
            }
        }
    }
    return take_key(subsystem, query, text, text_bytes);
}

/* Looks for the key in the entry of a subsystem, and then in that of the host. */
static bool find_in_host(struct json host, const struct security_key_query *query,
                         char text[SECURITY_KEY_TEXT_BYTES_MAX], size_t *text_bytes)
{
    struct json subsystems;
    struct json subsystem = {0};
    if (json_member(host, "subsystems", &subsystems)) {
        while (json_next(subsystems, &subsystem)) {
            if (member_equals(subsystem, "nqn", query->subsystem_nqn) &&
                find_in_subsystem(subsystem, query, text, text_bytes)) {
                return true;
            }
        }
    }
    return query->kind == SECURITY_KEY_HOST && take_key(host, query, text, text_bytes);
}

int security_key_find_in_json(const struct security_key_query *query, const char *json,
                              size_t json_bytes, char text[SECURITY_KEY_TEXT_BYTES_MAX],
                              size_t *text_bytes)
{
    struct json whole = {json, json_bytes};
    struct json host = {0};
    *text_bytes = 0;
    if (!json_is_valid(whole)) {
        return -EBADMSG;
    }
    while (json_next(whole, &host)) {
        if (member_equals(host, "hostnqn", query->host_nqn) &&
            find_in_host(host, query, text, text_bytes)) {
            return 0;
        }
    }
    *text_bytes = 0;
    return 0;
}
