/* The library's version and the phrases for its error codes. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <locale.h>
#include <string.h>

uint32_t dlfs_version(void)
{
    return DLFS_VERSION;
}

/* Phrases of the library's own codes, from -10001 downwards. */
#define PHRASE(code) [-10001 - (code)]
static const char *const own_phrases[] = {
    PHRASE(DLFS_E_CHECKSUM) = "checksum mismatch",
    PHRASE(DLFS_E_FORMAT) = "malformed structure",
    PHRASE(DLFS_E_TRUNCATED) = "fewer bytes than promised",
    PHRASE(DLFS_E_LOST) = "device is gone",
    PHRASE(DLFS_E_TIMEOUT) = "no completion within the time allowed",
    PHRASE(DLFS_E_CLOSED) = "object is shutting down",
    PHRASE(DLFS_E_LIMIT) = "limit exceeded",
    PHRASE(DLFS_E_NOT_FOUND) = "no such path",
    PHRASE(DLFS_E_END) = "end of the sequence",
    PHRASE(DLFS_E_PROTOCOL) = "target broke the protocol",
    PHRASE(DLFS_E_DIGEST) = "digest mismatch on the wire",
    PHRASE(DLFS_E_SERVICE) = "the service is gone, or does not answer",
    PHRASE(DLFS_E_AUTH) = "authentication failed",
};

/*
 * Returns the phrase of an errno as static text that no locale translates; NULL if it has none.
 *
 * strerrordesc_np would do the same, but needs glibc 2.32, and wheels are built for 2.28. The text
 * of an errno without a phrase belongs to the thread.
 */
static const char *errno_phrase(int error)
{
    int saved = errno;
    locale_t untranslated = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (untranslated == (locale_t)0) {
        return NULL;
    }
    const char *text = strerror_l(error, untranslated);
    freelocale(untranslated);
    errno = saved; /* callers ask for the text first, and then for the code */
    return strncmp(text, "Unknown error", strlen("Unknown error")) != 0 ? text : NULL;
}

const char *dlfs_strerror(int code)
{
    if (code >= 0) {
        return "success";
    }
    size_t number = code <= -10001 ? (size_t)(-10001 - code) : SIZE_MAX;
    if (number < sizeof own_phrases / sizeof *own_phrases) {
        return own_phrases[number];
    }
    const char *text = code > -10000 ? errno_phrase(-code) : NULL;
    return text != NULL ? text : "unknown error";
}
