/* The library's version and the phrases for its error codes. */
#include <dlfs/dlfs.h>

#include <errno.h>
#include <locale.h>
#include <string.h>

uint32_t dlfs_version(void)
{
    return DLFS_VERSION;
}

/* Returns the phrase of one of the library's own codes; NULL for any other code. */
static const char *own_phrase(int code)
{
    switch (code) {
    case DLFS_E_CHECKSUM:
        return "checksum mismatch";
    case DLFS_E_FORMAT:
        return "malformed structure";
    case DLFS_E_TRUNCATED:
        return "fewer bytes than promised";
    case DLFS_E_LOST:
        return "device is gone";
    case DLFS_E_TIMEOUT:
        return "no completion within the time allowed";
    case DLFS_E_CLOSED:
        return "object is shutting down";
    case DLFS_E_LIMIT:
        return "limit exceeded";
    case DLFS_E_NOT_FOUND:
        return "no such path";
    case DLFS_E_END:
        return "end of the sequence";
    case DLFS_E_PROTOCOL:
        return "target broke the protocol";
    case DLFS_E_DIGEST:
        return "digest mismatch on the wire";
    case DLFS_E_SERVICE:
        return "the service is gone, or does not answer";
    case DLFS_E_AUTH:
        return "authentication failed";
    default:
        return NULL;
    }
}

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
    const char *phrase = own_phrase(code);
    if (phrase != NULL) {
        return phrase;
    }
    const char *text = code > -10000 ? errno_phrase(-code) : NULL;
    return text != NULL ? text : "unknown error";
}
