/* Representations of keys, the files that keep them, and the file of nvme-cli. */
#include "check.h"
#include "security/key.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dlfs/codes.h"

/* The example of nvme-cli's manual page nvme-gen-dhchap-key(1), without a transformation. */
#define KEY_32 "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
#define HOST "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-1111-1111-111111111111"
#define SUBSYSTEM "nqn.2024-01.org.example:disk0"

static int parse(const char *text, const char **reason)
{
    struct security_key key;
    *reason = NULL;
    return security_key_parse(SECURITY_KEY_HOST, text, strlen(text), &key, reason);
}

static void test_parse(void)
{
    struct security_key key;
    const char *why = NULL;
    CHECK_EQ(security_key_parse(SECURITY_KEY_HOST, KEY_32, strlen(KEY_32), &key, &why), 0);
    CHECK_EQ(key.hash, NVME_HASH_NONE);
    CHECK_EQ(key.count, 32);
    CHECK_EQ(key.bytes[0], 0x89);
    CHECK_EQ(security_key_parse(SECURITY_KEY_TLS, KEY_32, strlen(KEY_32), &key, &why), DLFS_E_AUTH);
    for (size_t i = 0; i < sizeof key; i++) {
        CHECK_EQ(((const uint8_t *)&key)[i], 0); /* a key that was refused is wiped */
    }
    CHECK_EQ(parse("DHHC-1:01:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", &why), 0);
}

/* The keys of libnvme's tests (test/psk.c) in their interchange format. */
static void test_interchange(void)
{
    static const uint8_t first[] = {0x55, 0x12, 0xDB, 0xB6, 0x73, 0x7D, 0x01, 0x06};
    static const struct {
        const char *text;
        uint32_t hash;
        uint32_t count;
    } cases[] = {
        {"NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", NVME_HASH_NONE, 32},
        {"NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", NVME_HASH_SHA256, 32},
        {"NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/"
         "w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
         NVME_HASH_SHA384, 48},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct security_key key;
        const char *why = NULL;
        CHECK_EQ(
            security_key_parse(SECURITY_KEY_TLS, cases[i].text, strlen(cases[i].text), &key, &why),
            0);
        CHECK_EQ(key.hash, cases[i].hash);
        CHECK_EQ(key.count, cases[i].count);
        CHECK(memcmp(key.bytes, first, sizeof first) == 0);
    }
}

static void test_refuses(void)
{
    static const struct {
        const char *text;
        const char *reason;
    } cases[] = {
        {"", "DHHC-1:"},
        {"DHHC-2:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", "DHHC-1:"},
        {"DHHC-1:", "hash is unknown"},
        {"DHHC-1:04:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", "hash is unknown"},
        {"DHHC-1:00", "hash is unknown"},
        {"DHHC-1:00:", "colon"},
        {"DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n", "colon"},
        {"DHHC-1:00::", "base64"},
        {"DHHC-1:00:AAAA:", "base64"},
        {"DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2:", "base64"},
        {"DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2!:", "base64"},
        {"DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ==:", "length"},
        {"DHHC-1:02:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", "length"},
        {"DHHC-1:03:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", "length"},
        {"DHHC-1:00:iA6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:", "CRC"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *why;
        CHECK_EQ(parse(cases[i].text, &why), DLFS_E_AUTH);
        CHECK(strstr(why, cases[i].reason) != NULL);
    }
}

static void test_names(void)
{
    CHECK(security_key_name_is_valid("host.dhchap"));
    CHECK(security_key_name_is_valid("A-z_09"));
    CHECK(!security_key_name_is_valid(""));
    CHECK(!security_key_name_is_valid("."));
    CHECK(!security_key_name_is_valid("../key"));
    CHECK(!security_key_name_is_valid("a/b"));
    CHECK(!security_key_name_is_valid("a b"));
    char name[NVME_KEY_NAME_BYTES_MAX + 2] = "";
    memset(name, 'a', NVME_KEY_NAME_BYTES_MAX);
    CHECK(security_key_name_is_valid(name));
    name[NVME_KEY_NAME_BYTES_MAX] = 'a';
    CHECK(!security_key_name_is_valid(name));
}

/* ---- files ----------------------------------------------------------------------------------- */

static void write_file(const char *folder, const char *name, const char *text, mode_t mode)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    (void)unlink(path);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    CHECK(file >= 0);
    CHECK_EQ(write(file, text, strlen(text)), (ssize_t)strlen(text));
    CHECK_EQ(fchmod(file, mode), 0);
    CHECK_EQ(close(file), 0);
}

static int find(const char *name, char message[NVME_SECURITY_TEXT_BYTES])
{
    struct security_key key = {.count = 0};
    const struct security_key_query query = {
        .kind = SECURITY_KEY_HOST, .name = name, .host_nqn = HOST, .subsystem_nqn = SUBSYSTEM};
    int code = security_key_find(&query, &key, message);
    CHECK(code < 0 || key.count == 32);
    CHECK(strstr(message, "ia6z") == NULL);
    return code;
}

static void test_find(void)
{
    char folder[] = "/tmp/dlfs-keys-XXXXXX";
    char credentials[] = "/tmp/dlfs-credentials-XXXXXX";
    char message[NVME_SECURITY_TEXT_BYTES] = "";
    CHECK(mkdtemp(folder) != NULL && mkdtemp(credentials) != NULL);
    CHECK_EQ(setenv("DLFS_KEYS", folder, 1), 0);
    CHECK_EQ(find("a", message), DLFS_E_AUTH);
    CHECK(strstr(message, folder) != NULL);
    write_file(folder, "a", KEY_32 "\n", 0600);
    CHECK_EQ(find("a", message), 0);
    write_file(folder, "a", KEY_32, 0640);
    CHECK_EQ(find("a", message), DLFS_E_AUTH);
    CHECK(strstr(message, "chmod 0600") != NULL);
    write_file(folder, "a", "DHHC-1:00:ia6zGodOr4", 0600);
    CHECK_EQ(find("a", message), DLFS_E_AUTH);
    CHECK(strstr(message, "cut") != NULL);
    write_file(folder, "a", KEY_32, 0600);
    CHECK_EQ(chmod(folder, 0755), 0);
    CHECK_EQ(find("a", message), DLFS_E_AUTH);
    CHECK(strstr(message, "chmod 0700") != NULL);
    /* The credentials of a service come first, and systemd has set their permissions. */
    CHECK_EQ(setenv("CREDENTIALS_DIRECTORY", credentials, 1), 0);
    write_file(credentials, "a", KEY_32, 0444);
    CHECK_EQ(find("a", message), 0);
    CHECK_EQ(find("../a", message), DLFS_E_AUTH);
    CHECK_EQ(unsetenv("CREDENTIALS_DIRECTORY"), 0);
    /* $DLFS_KEYS stands for both other directories. */
    char home[512];
    CHECK_EQ(unsetenv("DLFS_KEYS"), 0);
    CHECK_EQ(setenv("HOME", folder, 1), 0);
    (void)snprintf(home, sizeof home, "%s/.config", folder);
    CHECK_EQ(mkdir(home, 0755), 0);
    (void)snprintf(home, sizeof home, "%s/.config/dlfs", folder);
    CHECK_EQ(mkdir(home, 0755), 0);
    (void)snprintf(home, sizeof home, "%s/.config/dlfs/keys", folder);
    CHECK_EQ(mkdir(home, 0700), 0);
    write_file(home, "b", KEY_32, 0600);
    CHECK_EQ(find("b", message), 0);
    CHECK_EQ(setenv("DLFS_KEYS", "", 1), 0); /* as if it were not set */
    CHECK_EQ(setenv("CREDENTIALS_DIRECTORY", "", 1), 0);
    CHECK_EQ(find("b", message), 0);
    char remove[1100];
    (void)snprintf(remove, sizeof remove, "rm -r %s %s", folder, credentials);
    CHECK_EQ(system(remove), 0); // NOLINT(cert-env33-c)
}

/* ---- nvme-cli -------------------------------------------------------------------------------- */

static const char config[] =
    "[ {\"hostnqn\":\"nqn.2014-08.org.example:other\",\"dhchap_key\":\"other\"},\n"
    "  {\"hostnqn\":\"" HOST "\", \"hostid\":null, \"dhchap_key\":\"of \\/ host\",\n"
    "   \"subsystems\":[ {\"nqn\":\"nqn.x\",\"ports\":[{\"dhchap_key\":\"x\"}]},\n"
    "     {\"ports\":[{\"transport\":\"tcp\",\"n\":[1,-2.5e3,true,{}]},\n"
    "       {\"dhchap_ctrl_key\":\"of controller\"}], \"nqn\":\"" SUBSYSTEM "\"}]}]";

static const char escaped[] =
    "[1,{\"\\u0068ostnqn\" : \"" HOST "\",\"dhchap_key\":\"a\\\\b\\u0020c\"}]";
static const char unusable[] = "[{\"hostnqn\":\"" HOST "\",\"dhchap_key\":\"a\\u0000\\u00e9\"}]";

static int find_json(enum security_key_kind kind, const char *json, char text[64])
{
    char found[SECURITY_KEY_TEXT_BYTES_MAX + 1];
    const struct security_key_query query = {
        .kind = kind, .name = "any", .host_nqn = HOST, .subsystem_nqn = SUBSYSTEM};
    int code = security_key_find_in_json(&query, json, found);
    (void)snprintf(text, 64, "%.63s", found);
    return code;
}

static void test_json(void)
{
    char text[64];
    CHECK_EQ(find_json(SECURITY_KEY_HOST, config, text), 0);
    CHECK(strcmp(text, "of / host") == 0);
    CHECK_EQ(find_json(SECURITY_KEY_CONTROLLER, config, text), 0);
    CHECK(strcmp(text, "of controller") == 0);
    CHECK_EQ(find_json(SECURITY_KEY_TLS, config, text), 0);
    CHECK(strcmp(text, "") == 0);
    CHECK_EQ(find_json(SECURITY_KEY_HOST, "[]", text), 0);
    CHECK_EQ(find_json(SECURITY_KEY_HOST, "{}", text), 0);
    CHECK_EQ(find_json(SECURITY_KEY_HOST, escaped, text), 0);
    CHECK(strcmp(text, "a\\b c") == 0);
    CHECK_EQ(find_json(SECURITY_KEY_HOST, unusable, text), 0);
    CHECK(strcmp(text, "") == 0);
    static const char *const malformed[] = {
        "",        "[",   "[}",    "[1,]",  "{\"a\"}", "{\"a\":1,}", "[] []",   "\"\\q\"",
        "\"\\u12", "\"a", "[1 2]", "{1:2}", "\"\\",    "{\"a\":",    "\"a\n\"", "[1"};
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        CHECK_EQ(find_json(SECURITY_KEY_HOST, malformed[i], text), -EBADMSG);
    }
    char deep[200];
    memset(deep, '[', sizeof deep);
    deep[sizeof deep - 1] = '\0';
    CHECK_EQ(find_json(SECURITY_KEY_HOST, deep, text), -EBADMSG);
}

int main(void)
{
    test_parse();
    test_interchange();
    test_refuses();
    test_names();
    test_find();
    test_json();
    return 0;
}
