/*
 * Keys by name, and the text in which they are stored.
 *
 * A URI names a key. security_key_find looks the name up anew at every connection, so that a key
 * that was replaced in its file is used from the next connection on:
 *
 *   1. the file NAME in $CREDENTIALS_DIRECTORY (systemd's credentials of a service);
 *   2. the file NAME in $DLFS_KEYS, or if that is not set in ~/.config/dlfs/keys and then in
 *      /etc/dlfs/keys: the directory has mode 0700 and the file 0600, both of this user or root;
 *   3. /etc/nvme/config.json of nvme-cli, mode 0600: the key of this host and subsystem, whatever
 *      NAME is.
 *
 * A file contains one representation: DHHC-1:hh:B: for authentication or NVMeTLSkey-1:hh:B: for
 * TLS, where B is the base64 code of the key and its CRC-32. No message contains a part of one.
 *
 * Threads: any at once.
 *
 * Source: NVM Express Base Specification 2.1, section 8.3.4.5.8; TCP Transport Specification 1.1,
 * section 3.6.1.5; RFC 4648; the configuration file of nvme-cli 2.
 */
#ifndef DLFS_SECURITY_KEY_H
#define DLFS_SECURITY_KEY_H

#include "nvme/security/security.h"

#define SECURITY_KEY_BYTES_MAX 64u
#define SECURITY_KEY_CRC_BYTES 4u
/* Longest representation: a prefix of at most 17 characters, 68 bytes in base64, a colon. */
#define SECURITY_KEY_TEXT_BYTES_MAX 128u

enum security_key_kind {
    SECURITY_KEY_HOST,       /* DHHC-1, of this host */
    SECURITY_KEY_CONTROLLER, /* DHHC-1, of the controller */
    SECURITY_KEY_TLS,        /* NVMeTLSkey-1 */
};

/* A key. It belongs into memory of secret_allocate. */
struct security_key {
    uint32_t hash;  /* NVME_HASH_*, of the key's transformation; NVME_HASH_NONE: used as it is */
    uint32_t count; /* 32, 48 or 64 */
    uint8_t bytes[SECURITY_KEY_BYTES_MAX + SECURITY_KEY_CRC_BYTES]; /* the key; then its CRC */
};

/* The key to find. */
struct security_key_query {
    enum security_key_kind kind;
    const char *name;
    const char *host_nqn; /* the NQNs select an entry of nvme-cli's file */
    const char *subsystem_nqn;
};

/* Returns true for 1 to 64 of A-Z a-z 0-9 . _ - that do not begin with a dot. */
bool security_key_name_is_valid(const char *name);
/*
 * Decodes a representation. Errors: DLFS_E_AUTH, with *reason and a wiped key: another prefix, hash
 * or length, text that is no base64, a CRC that does not match.
 */
int security_key_parse(enum security_key_kind kind, const char *text, size_t count,
                       struct security_key *key, const char **reason);
/* Finds and decodes a key. Errors: DLFS_E_AUTH and -ENOMEM, with message. */
int security_key_find(const struct security_key_query *query, struct security_key *key,
                      char message[NVME_SECURITY_TEXT_BYTES]);
/* Finds the key of a query in the text of nvme-cli's file, which ends with NUL; *text is empty if
 * it has none. Errors: -EBADMSG (not JSON). */
int security_key_find_in_json(const struct security_key_query *query, const char *json,
                              char text[SECURITY_KEY_TEXT_BYTES_MAX + 1]);

#endif
