/*
 * The program that has most tests, so that the library is linked once: runs the one that its
 * argument names. CMakeLists.txt writes tests.inc, a line TEST(name) for each, and renames their
 * main functions.
 */
#include <stdio.h>
#include <string.h>

#define TEST(name) int main_of_##name(void);
#include "tests.inc"
#undef TEST

int main(int count, char **arguments)
{
#define TEST(name)                                        \
    if (count == 2 && strcmp(arguments[1], #name) == 0) { \
        return main_of_##name();                          \
    }
#include "tests.inc"
    (void)fprintf(stderr, "expected the name of a test, such as test_reader\n");
    return 2;
}
