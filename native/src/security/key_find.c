/* Finds keys by name in files; see security/key.h. */
#include "security/key.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dlfs/codes.h"
#include "security/secret.h"

#define SYSTEM_DIRECTORY "/etc/dlfs/keys"
#define USER_DIRECTORY ".config/dlfs/keys" /* in $HOME */
#define NVME_CLI_FILE "/etc/nvme/config.json"
#define FILE_BYTES_MAX ((size_t)256 << 10)
#define MODE_OTHERS 077u /* permissions of the group and of others */

/* A search: the query, the file that it reads, and memory for the contents. */
struct search {
    const struct security_key_query *query;
    struct security_key *key;
    char *message;
    char *contents; /* FILE_BYTES_MAX, of secret_allocate */
    size_t content_bytes;
    bool found;
};

static int refuse(const struct search *search, const char *path, const char *why)
{
    (void)snprintf(search->message, NVME_SECURITY_TEXT_BYTES, "key %s: %.300s: %s",
                   search->query->name, path, why);
    return DLFS_E_AUTH;
}

/* Checks that a file or directory belongs to this user or root, and that no other can read it. */
static int check_owner(const struct search *search, const char *path, const struct stat *status)
{
    char why[160];
    bool is_directory = S_ISDIR(status->st_mode);
    if (status->st_uid != geteuid() && status->st_uid != 0) {
        (void)snprintf(why, sizeof why, "it belongs to user %u, not to this one or root",
                       (unsigned)status->st_uid);
        return refuse(search, path, why);
    }
    if ((status->st_mode & MODE_OTHERS) != 0) {
        (void)snprintf(why, sizeof why,
                       "other users have access to it (mode %04o): chmod %s it first",
                       (unsigned)(status->st_mode & 07777), is_directory ? "0700" : "0600");
        return refuse(search, path, why);
    }
    return 0;
}

/* Reads an open file. path is for messages. */
static int read_file(struct search *search, int descriptor, const char *path, bool check)
{
    struct stat status;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
        return refuse(search, path, "it is not a regular file");
    }
    int code = check ? check_owner(search, path, &status) : 0;
    if (code < 0) {
        return code;
    }
    size_t count = 0;
    while (count < FILE_BYTES_MAX) {
        ssize_t got = read(descriptor, search->contents + count, FILE_BYTES_MAX - count);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return refuse(search, path, "it cannot be read");
        }
        if (got == 0) {
            search->contents[count] = '\0';
            search->content_bytes = count;
            return 0;
        }
        count += (size_t)got;
    }
    return refuse(search, path, "it is too long");
}

static int parse_key(struct search *search, const char *path, const char *text, size_t count)
{
    const char *why = "";
    while (count > 0 && text[count - 1] != '\0' && strchr(" \t\r\n", text[count - 1]) != NULL) {
        count--; /* the end of the line */
    }
    int code = security_key_parse(search->query->kind, text, count, search->key, &why);
    if (code < 0) {
        return refuse(search, path, why);
    }
    search->found = true;
    return 0;
}

/* Looks into one directory. check: it is a key directory, whose permissions matter. */
static int look_into(struct search *search, const char *folder, bool check)
{
    char path[PATH_MAX];
    struct stat status;
    int descriptor = open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) {
        return 0; /* as good as empty: the message of a key that is nowhere names the directories */
    }
    int file =
        openat(descriptor, search->query->name, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    int error = file < 0 ? errno : 0;
    int code = 0;
    (void)snprintf(path, sizeof path, "%s/%s", folder, search->query->name);
    if (file >= 0 && check && fstat(descriptor, &status) == 0) {
        code = check_owner(search, folder, &status);
    }
    if (file >= 0 && code == 0) {
        code = read_file(search, file, path, check);
    } else if (error != 0 && error != ENOENT) {
        code = refuse(search, path, error == EACCES ? "permission denied" : "it cannot be opened");
    }
    if (file >= 0) {
        (void)close(file);
    }
    (void)close(descriptor);
    return file >= 0 && code == 0 ? parse_key(search, path, search->contents, search->content_bytes)
                                  : code;
}

/* Looks into the file of nvme-cli. */
static int look_into_nvme_cli(struct search *search)
{
    char text[SECURITY_KEY_TEXT_BYTES_MAX + 1] = "";
    int file = open(NVME_CLI_FILE, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0) {
        return 0;
    }
    int code = read_file(search, file, NVME_CLI_FILE, true);
    (void)close(file);
    if (code == 0 && (strlen(search->contents) < search->content_bytes ||
                      security_key_find_in_json(search->query, search->contents, text) < 0)) {
        code = refuse(search, NVME_CLI_FILE, "it is not JSON");
    }
    if (code == 0 && text[0] != '\0') {
        code = parse_key(search, NVME_CLI_FILE, text, strlen(text));
    }
    secret_wipe(text, sizeof text);
    return code;
}

/* Writes the path of the key directory of this user; returns false if there is none. */
static bool user_directory(char path[PATH_MAX])
{
    const char *home = secure_getenv("HOME");
    if (home == NULL || home[0] != '/') {
        return false;
    }
    return snprintf(path, PATH_MAX, "%s/" USER_DIRECTORY, home) < PATH_MAX;
}

/* Returns the value of an environment variable; NULL if it is not set, or empty. */
static const char *setting(const char *name)
{
    const char *value = secure_getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

/* Looks into all places, in their order, until one has the key. */
static int look_everywhere(struct search *search)
{
    char user[PATH_MAX];
    const char *credentials = setting("CREDENTIALS_DIRECTORY");
    const char *chosen = setting("DLFS_KEYS");
    int code = credentials != NULL ? look_into(search, credentials, false) : 0;
    if (code == 0 && !search->found && chosen != NULL) {
        code = look_into(search, chosen, true);
    }
    if (code == 0 && !search->found && chosen == NULL && user_directory(user)) {
        code = look_into(search, user, true);
    }
    if (code == 0 && !search->found && chosen == NULL) {
        code = look_into(search, SYSTEM_DIRECTORY, true);
    }
    if (code == 0 && !search->found) {
        code = look_into_nvme_cli(search);
    }
    if (code == 0 && !search->found) {
        (void)snprintf(search->message, NVME_SECURITY_TEXT_BYTES,
                       "key %s: no such file in %.200s%s, nor an entry in " NVME_CLI_FILE,
                       search->query->name,
                       chosen != NULL ? chosen : "~/" USER_DIRECTORY " and " SYSTEM_DIRECTORY,
                       credentials != NULL ? " and the credentials of this service" : "");
        code = DLFS_E_AUTH;
    }
    return code;
}

int security_key_find(const struct security_key_query *query, struct security_key *key,
                      char message[NVME_SECURITY_TEXT_BYTES])
{
    if (!security_key_name_is_valid(query->name)) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES,
                       "expected the name of a key, 1 to 64 of A-Z a-z 0-9 . _ -");
        return DLFS_E_AUTH;
    }
    struct search search = {.query = query, .key = key, .message = message};
    search.contents = secret_allocate(FILE_BYTES_MAX);
    if (search.contents == NULL) {
        (void)snprintf(message, NVME_SECURITY_TEXT_BYTES, "no memory for a key");
        return -ENOMEM;
    }
    int code = look_everywhere(&search);
    secret_free(search.contents, FILE_BYTES_MAX);
    return code;
}
