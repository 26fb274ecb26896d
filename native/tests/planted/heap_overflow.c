/* Writes one byte behind an allocation. AddressSanitizer must end this program. */
#include <stdlib.h>

int main(int argc, char **argv)
{
    (void)argv;
    volatile char *bytes = malloc(8);
    if (bytes == NULL) {
        return 0;
    }
    bytes[7 + argc] = 1;
    free((void *)bytes);
    return 0;
}
