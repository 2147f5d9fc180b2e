/** Login with a token. */
import { useState } from 'preact/hooks';
import { ProblemBox, useTask } from '../parts/basics';
import { Bird } from '../parts/bird';
import { loggedOut, logIn } from '../state/session';

export function LoginPage() {
  const [token, setToken] = useState('');
  const task = useTask();
  const problem = task.problem ?? loggedOut.value;
  return (
    <main class="login">
      <form
        class="login-card"
        onSubmit={(event) => {
          event.preventDefault();
          if (token.trim() !== '' && !task.busy) void task.run(() => logIn(token.trim()));
        }}
      >
        <h1>
          <Bird /> Godwit
        </h1>
        <div class="field">
          <label for="token">Token</label>
          <input
            id="token"
            type="password"
            name="token"
            autocomplete="off"
            spellcheck={false}
            value={token}
            autofocus
            onInput={(event) => setToken(event.currentTarget.value)}
            aria-describedby="token-hint"
          />
          <small id="token-hint" class="muted">
            An admin creates one with <code>godwit control token create NAME --role operator</code>.
            It is kept in this tab only, until the tab is closed.
          </small>
        </div>
        {problem && <ProblemBox problem={problem} />}
        <button
          type="submit"
          class="act primary"
          aria-disabled={token.trim() === '' || task.busy}
          aria-busy={task.busy}
        >
          Log in
        </button>
      </form>
    </main>
  );
}
