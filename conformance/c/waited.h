/* Who does not run is late without being wrong. */
#ifndef WAITED_H
#define WAITED_H

/* Seconds that the threads of this process, all together, were ready to run and did not. */
double waited_for_processors(void);

#endif
