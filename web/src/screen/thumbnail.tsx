/** A small picture of a VM's screen, taken again every few seconds while it is visible. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { API, authorization, part, problemOf, refusal } from '../api/http';
import { setQuery } from '../state/route';

const REFRESH_MS = 5000;

/** `isCalm`: the VM runs and does not move; a move's pause is not made longer by pictures. */
export function Thumbnail({ vm, isCalm }: { vm: string; isCalm: boolean }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [why, setWhy] = useState<string | null>(null);
  const [isDrawn, setDrawn] = useState(false);
  useEffect(() => {
    const element = canvas.current;
    if (!element || !isCalm) return;
    const ending = new AbortController();
    let isVisible = true;
    let timer = 0;
    const seen = new IntersectionObserver((entries) => {
      isVisible = entries.some((entry) => entry.isIntersecting);
    });
    seen.observe(element);
    const take = async () => {
      if (isVisible && document.visibilityState === 'visible') {
        try {
          await draw(vm, element, ending.signal);
          setDrawn(true);
          setWhy(null);
        } catch (error) {
          if (!ending.signal.aborted) setWhy(problemOf(error).detail ?? 'No picture.');
        }
      }
      if (!ending.signal.aborted) timer = window.setTimeout(take, REFRESH_MS);
    };
    void take();
    return () => {
      ending.abort();
      clearTimeout(timer);
      seen.disconnect();
    };
  }, [vm, isCalm]);
  return (
    <>
      <button
        type="button"
        class="thumbnail"
        aria-label={`Open the screen of ${vm}`}
        onClick={() => setQuery('tab', 'screen')}
      >
        <canvas ref={canvas} class={isDrawn ? '' : 'thumbnail-empty'} width={320} height={200} />
      </button>
      {why && <p class="muted">{why}</p>}
    </>
  );
}

async function draw(vm: string, canvas: HTMLCanvasElement, signal: AbortSignal): Promise<void> {
  const response = await fetch(`${API}/vms/${part(vm)}/screenshot`, {
    headers: authorization(),
    cache: 'no-store',
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const picture = await createImageBitmap(await response.blob());
  if (signal.aborted) return;
  canvas.width = picture.width;
  canvas.height = picture.height;
  canvas.getContext('2d')?.drawImage(picture, 0, 0);
  picture.close();
}
