/* The messages of a volume: their text, and the names of members in them. */
#include <stdarg.h>
#include <stdio.h>

#include "volume/volume.h"

struct volume_name volume_member_name(const dlfs_volume *volume, uint32_t member)
{
    struct volume_name name;
    memcpy(name.text, volume->names[member], sizeof name.text);
    if (name.text[0] == '\0') {
        (void)snprintf(name.text, sizeof name.text, "member %u", member);
    }
    return name;
}

int volume_fail(char *message, uint32_t message_bytes, int code, const char *form, ...)
{
    va_list arguments;
    if (message != NULL && message_bytes > 0) {
        va_start(arguments, form);
        (void)vsnprintf(message, message_bytes, form, arguments);
        va_end(arguments);
    }
    return code;
}
