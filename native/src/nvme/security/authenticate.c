/* Authenticates one connection; see nvme/security/authenticate.h. */
#include "nvme/security/authenticate.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#include "nvme/protocol/auth_message.h"

/* NQN of every discovery controller; most of them ask for no authentication. */
#define DISCOVERY_NQN "nqn.2014-08.org.nvmexpress.discovery"

/* One authentication. */
struct exchange {
    struct nvme_connection *connection;
    const struct nvme_config *config;
    const struct nvme_security *security;
    const struct nvme_deadline *deadline;
    struct nvme_chap *session;
    struct nvme_text *text;
    uint16_t transaction;
    uint8_t secure_channel;
    struct nvme_chap_answer answer;
    uint8_t message[NVME_AUTH_BYTES_MAX]; /* the one that is sent or was received */
    uint32_t received_bytes;
};

static int run(struct exchange *exchange, bool receive, uint32_t data_bytes)
{
    struct nvme_text reason;
    struct nvme_exchange command = {.data = exchange->message,
                                    .data_bytes = data_bytes,
                                    .direction = receive ? DLFS_NVME_DATA_IN : DLFS_NVME_DATA_OUT};
    const char *name = receive ? "Authentication Receive" : "Authentication Send";
    nvme_entry_authenticate(command.entry, receive, data_bytes);
    int code =
        nvme_connection_run(exchange->connection, &command, exchange->deadline, name, &reason);
    if (code == DLFS_E_LOST && receive) {
        nvme_text_format(exchange->text,
                         "the target refused this host, or was restarted: it closed the "
                         "connection in the authentication (%.250s)",
                         reason.bytes);
        return NVME_AUTH_CLOSED;
    }
    if (code < 0) {
        *exchange->text = reason;
        return code;
    }
    if (command.status != 0) {
        nvme_text_format(exchange->text, "the target refused this host: %s: status 0x%x, %s", name,
                         command.status, nvme_status_phrase(command.status));
        return DLFS_E_AUTH;
    }
    exchange->received_bytes = command.received_bytes;
    return 0;
}

static int receive_message(struct exchange *exchange)
{
    memset(exchange->message, 0, sizeof exchange->message);
    return run(exchange, true, sizeof exchange->message);
}

/* Writes the message of a refusal. Tells the target of its own, before the connection is closed. */
static int refuse(struct exchange *exchange, const struct nvme_auth_refusal *refusal)
{
    nvme_text_format(exchange->text, "%s: %s",
                     refusal->by_target ? "the target refused this host"
                                        : "this host refused the target",
                     refusal->reason);
    if (!refusal->by_target) {
        struct nvme_text ignored;
        struct exchange last = *exchange;
        last.text = &ignored;
        (void)run(&last, false,
                  nvme_auth_failure2(exchange->transaction, refusal->explanation, last.message));
    }
    return DLFS_E_AUTH;
}

/* Offers hashes and groups, and answers the challenge that comes. */
static int answer_challenge(struct exchange *exchange)
{
    struct nvme_chap_challenge challenge;
    struct nvme_auth_refusal refusal;
    int code = run(
        exchange, false,
        nvme_auth_negotiate(exchange->transaction, exchange->secure_channel, exchange->message));
    if (code == 0) {
        code = receive_message(exchange);
    }
    if (code < 0) {
        return code;
    }
    code = nvme_auth_decode_challenge(exchange->message, exchange->received_bytes,
                                      exchange->transaction, exchange->secure_channel, &challenge,
                                      &refusal);
    if (code < 0) {
        return refuse(exchange, &refusal);
    }
    code = exchange->security->chap_answer(exchange->session, &challenge, &exchange->answer);
    if (code == DLFS_E_AUTH) {
        refusal = (struct nvme_auth_refusal){
            .explanation = NVME_AUTH_BAD_PAYLOAD,
            .reason = "its challenge was used before, or has a public value that is not valid"};
        return refuse(exchange, &refusal);
    }
    if (code < 0) {
        nvme_text_format(exchange->text, "authenticate: OpenSSL failed");
        return code;
    }
    return run(exchange, false,
               nvme_auth_reply(exchange->transaction, &exchange->answer, exchange->message));
}

/* Receives the controller's verdict, and its response if this host challenged it. */
static int check_success(struct exchange *exchange)
{
    const uint8_t *response;
    struct nvme_auth_refusal refusal;
    int code = receive_message(exchange);
    if (code < 0) {
        return code;
    }
    code = nvme_auth_decode_success1(exchange->message, exchange->received_bytes,
                                     exchange->transaction, exchange->answer.hash_bytes, &response,
                                     &refusal);
    if (code < 0) {
        return refuse(exchange, &refusal);
    }
    if (exchange->answer.sequence == 0) {
        return 0; /* one-way */
    }
    if (response == NULL || !exchange->security->chap_verify(exchange->session, response)) {
        refusal = (struct nvme_auth_refusal){
            .explanation = NVME_AUTH_FAILED,
            .reason = response == NULL ? "it gave no response to the challenge"
                                       : "its response is wrong: is dhchap_ctrl_key its key?"};
        return refuse(exchange, &refusal);
    }
    return run(exchange, false, nvme_auth_success2(exchange->transaction, exchange->message));
}

/* Has both sides' TLS key generated, and gives it to the connection. */
static int generate_key(struct exchange *exchange)
{
    struct nvme_connection *connection = exchange->connection;
    struct nvme_tls_key *key;
    int code = exchange->security->chap_generate_tls_key(exchange->session, &key);
    if (code < 0) {
        nvme_text_format(exchange->text, "generate a TLS key: %s", dlfs_strerror(code));
        return code;
    }
    exchange->security->tls_key_free(connection->generated);
    connection->security = exchange->security;
    connection->generated = key;
    return 0;
}

int nvme_authenticate(struct nvme_connection *connection, const struct nvme_config *config,
                      uint8_t secure_channel, const struct nvme_deadline *deadline,
                      struct nvme_text *text)
{
    char message[NVME_SECURITY_TEXT_BYTES] = "";
    const struct nvme_chap_config names = {
        .host_key = config->dhchap_key,
        .controller_key = config->dhchap_ctrl_key[0] != '\0' ? config->dhchap_ctrl_key : NULL,
        .host_nqn = config->host_nqn,
        .subsystem_nqn = config->subsystem_nqn};
    struct exchange *exchange = malloc(sizeof *exchange);
    if (exchange == NULL) {
        nvme_text_format(text, "no memory");
        return -ENOMEM;
    }
    *exchange = (struct exchange){.connection = connection,
                                  .config = config,
                                  .deadline = deadline,
                                  .text = text,
                                  .secure_channel = secure_channel};
    int code = nvme_security_load(&exchange->security, message);
    if (code == 0) {
        code = exchange->security->chap_open(&names, &exchange->session, message);
    }
    if (code == 0 && getrandom(&exchange->transaction, sizeof exchange->transaction, 0) < 0) {
        code = -errno;
    }
    if (code < 0) {
        nvme_text_format(text, "%.500s", message[0] != '\0' ? message : dlfs_strerror(code));
        goto done;
    }
    code = answer_challenge(exchange);
    if (code == 0) {
        code = check_success(exchange);
    }
    if (code == 0 && secure_channel != NVME_CHANNEL_NONE) {
        code = generate_key(exchange);
    }
done:
    if (exchange->session != NULL) {
        exchange->security->chap_close(exchange->session);
    }
    free(exchange);
    return code;
}

int nvme_authenticate_connected(struct nvme_connection *connection,
                                const struct nvme_config *config, uint64_t connect_result,
                                const struct nvme_deadline *deadline, struct nvme_text *text)
{
    bool demanded = (connect_result & NVME_CONNECT_AUTHENTICATION) != 0;
    bool has_key = config->dhchap_key[0] != '\0';
    bool is_encrypted = connection->tls != NULL;
    if ((connect_result & NVME_CONNECT_SECURE_CHANNEL) != 0 && !config->concat) {
        nvme_text_format(text,
                         "subsystem %s demands a secure channel after authentication: concat=1 "
                         "generates a TLS key for one",
                         config->subsystem_nqn);
        return DLFS_E_AUTH;
    }
    if (config->concat && is_encrypted && !demanded) {
        return 0; /* the key of its TLS is from an authentication */
    }
    if (demanded && !has_key) {
        nvme_text_format(text,
                         "subsystem %s demands authentication: name a key of this host with "
                         "dhchap_key=NAME",
                         config->subsystem_nqn);
        return DLFS_E_AUTH;
    }
    bool is_discovery = strcmp(config->subsystem_nqn, DISCOVERY_NQN) == 0;
    if (!demanded && has_key && is_discovery && !config->concat) {
        return 0; /* it lists targets, and transfers no data of theirs */
    }
    if (!demanded && has_key) {
        nvme_text_format(text,
                         "this host refused the target: subsystem %s asks for no authentication, "
                         "which dhchap_key demands",
                         config->subsystem_nqn);
        return DLFS_E_AUTH;
    }
    bool generates = config->concat && !is_encrypted;
    return has_key
               ? nvme_authenticate(connection, config,
                                   generates ? NVME_CHANNEL_NEW : NVME_CHANNEL_NONE, deadline, text)
               : 0;
}
