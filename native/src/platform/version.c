/* The library's version and the phrases for its error codes. */
#include <dlfs/dlfs.h>

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
    default:
        return NULL;
    }
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
    /* strerrordesc_np returns static text, never localised and the same for every thread. */
    const char *text = code > -10000 ? strerrordesc_np(-code) : NULL;
    return text != NULL ? text : "unknown error";
}
