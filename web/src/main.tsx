import { render } from 'preact';
import { App } from './app';
import { startRouting } from './state/route';
import { resume } from './state/session';
import { startTheme } from './state/theme';
import './styles/base.css';
import './styles/frame.css';
import './styles/parts.css';
import './styles/pages.css';
import './styles/screen.css';
import './styles/terminal.css';

startTheme();
startRouting();
const place = document.getElementById('console');
if (place) render(<App />, place);
void resume();
